"""The operation as users call it: arguments, checks and the choice of an implementation."""

from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from oomb_jax.pallas_kernels.device import choose, no_hopper
from oomb_jax.pallas_kernels.page_score import reference
from oomb_jax.pallas_kernels.page_score.config import unsupported

Implementation = Literal["reference", "mosaic"]


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
    """How much each page of queries wants each earlier page.

    With i running over the queries of row r that vote, n over the query heads of key/value head m, and the softmax over
    the candidates start_r <= p < end,

        score_rmp = sum_i softmax_p((sum_n q_in) · representative_pm)

    Args:
      q: queries of a chunk. Query head n reads key/value head n // (N / M).
      representatives: one vector for each page and key/value head. Outside of start_r .. end they may hold anything.
      start, end: int32, the candidates of each row. There are R rows: row r has the r-th C/R queries.
      votes: which queries count.
      scaled: divides the logits by sqrt(H).
      implementation: `"mosaic"`, the kernel for Hopper GPUs, or `"reference"`; a name is taken at its word. None: the
        kernel where it can run, else the reference; on a GPU it logs once which and why.

    Returns:
      Scores in float32 (float64 for float64 queries): products of values in q's dtype, summed in that of the scores;
      0 where a page is no candidate. Neither implementation makes the logits of a whole chunk.

    Raises:
      ValueError: the shapes do not fit together.
      NotImplementedError: the named implementation does not exist for this input.
    """
    C, N, H = q.shape
    M, R = representatives.shape[1], start.shape[0]
    if N % M or representatives.shape[2] != H:
        shapes = f"queries {q.shape} [C, N, H] and representatives {representatives.shape} [P, M, H]"
        raise ValueError(f"{shapes}: H must be the same, and N a multiple of M")
    if C % R:
        raise ValueError(f"{C} queries in {R} rows: each row has the same number of them")
    refusals = {"mosaic": unsupported(q, representatives, start) or no_hopper()}
    if choose("page scores", implementation, refusals) == "reference":
        return reference.page_scores(q, representatives, start, end, votes, scaled=scaled)
    from oomb_jax.pallas_kernels.page_score import mosaic  # not every platform's jaxlib can import it

    return mosaic.page_scores(q, representatives, start, end, votes, scaled=scaled)
