"""One chunk of a sequence: where it stands, and which pages its queries attend to."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oomb_jax.config import Config
from oomb_jax.selection import TopK, select
from oomb_jax.sequence import Sequence, top_k
from oomb_jax.shapes import Positions, Queries, iota

SCORES: dict[str, Literal["reference", "mosaic"]] = {
    "reference": "reference",
    "mosaic": "mosaic",
    "triton": "reference",  # plain JAX, which runs on every GPU
}
"""How pages are scored where `config.implementation` names the attention."""

STOCHASTIC_CHUNKS = 64
"""Above so many chunks a gradient pool narrower than float32 rounds stochastically: to nearest, its sums stall once a
chunk's share falls below half a unit in the last place, 2**-9 of the sum in bfloat16."""


class Chunk(NamedTuple):
    """Where a chunk stands, and what it attends to."""

    config: Config
    top_k: TopK | None
    """None where all earlier pages are attended to."""
    number: Int[Array, ""]
    last: Bool[Array, ""]
    """Whether it is the last of the sequence."""
    first_page: Int[Array, ""]
    rows: int
    """R, pages of the chunk."""
    pages: int
    """P, pages of the sequence."""
    tokens: Int[Array, ""]
    """Those that are no padding."""
    positions: Positions
    rounding: jax.Array | None
    segments: dict[str, Any]
    """Arguments of the kernels; empty without segments."""

    @classmethod
    def of(cls, sequence: Sequence, c: Int[Array, ""], config: Config) -> "Chunk":
        """Chunk c of a sequence."""
        C, T = sequence.chunk, sequence.chunks * sequence.chunk
        rows = C // config.page
        segments = {}
        if sequence.segments is not None:
            by_page = sequence.segments.reshape(-1, config.page)
            segments = {"q_segments": sequence.segments[c], "pool_segments": by_page}
        return cls(
            config=config,
            top_k=top_k(T, config),
            number=c,
            last=c == sequence.chunks - 1,
            first_page=c * rows,
            rows=rows,
            pages=T // config.page,
            tokens=jnp.clip(sequence.length - c * C, 0, C),
            positions=sequence.positions(c),
            rounding=jax.random.fold_in(jax.random.key(0), c) if sequence.chunks > STOCHASTIC_CHUNKS else None,
            segments=segments,
        )

    @property
    def own_pages(self) -> Int[Array, " R"]:
        """Ids of the chunk's pages."""
        return self.first_page + iota(self.rows)

    def all_pages(self) -> Int[Array, "1 K"]:
        """One row for all queries: the pages before the chunk."""
        ids = iota(self.pages)
        return jnp.where(ids < self.first_page, ids, -1)[None]

    def choose(self, representatives: Float[Array, "P M H"] | None, q: Queries) -> Int[Array, "R *M K"]:
        """The pages that the queries of a layer attend to: a row for each query page, or one for all.

        Args:
          representatives: of the layer's pages; None where all pages are attended to.
          q: queries of the layer.
        """
        if self.top_k is None or representatives is None:
            return self.all_pages()
        return select(
            self.top_k,
            q,
            representatives[: self.pages],
            self.first_page,
            page=self.config.page,
            tokens=self.tokens,
            implementation=None if self.config.implementation is None else SCORES[self.config.implementation],
            **self.segments,
        )
