"""The operation as users call it: arguments, checks and the choice of an implementation."""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from oomb_jax.pallas_kernels.page_score import reference

Implementation = Literal["reference"]


def page_scores(
    q: Float[Array, "C N H"],
    representatives: Float[Array, "P M H"],
    start: Int[Array, " R"],
    end: Int[Array, ""],
    votes: Bool[Array, " C"],
    *,
    scaled: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "R M P"]:
    """Scores."""
    return reference.page_scores(q, representatives, start, end, votes, scaled=scaled)
