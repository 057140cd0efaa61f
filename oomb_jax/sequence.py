"""One sequence cut into chunks, with what its attention masks need."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, DTypeLike, Int

from oomb_jax.config import Config
from oomb_jax.selection import TopK
from oomb_jax.shapes import IGNORE, Positions, Scalar, iota


class Sequence(NamedTuple):
    """One sequence, padded at its end to whole chunks. Padding has no label and comes after every real token, so the
    causal mask keeps it out of everything."""

    tokens: Int[Array, "n C"]
    labels: Int[Array, "n C"]
    segments: Int[Array, "n C"] | None
    segment_positions: Int[Array, "n C"] | None
    """Positions that restart with each segment. Without segments none are stored: they follow from the index."""
    length: Int[Array, ""]
    """T, the tokens that are no padding."""

    @property
    def chunks(self) -> int:
        """n."""
        return self.tokens.shape[0]

    @property
    def chunk(self) -> int:
        """C."""
        return self.tokens.shape[1]

    def positions(self, c: Int[Array, ""]) -> Positions:
        """Positions of the tokens of chunk c within their segment."""
        if self.segment_positions is not None:
            return self.segment_positions[c]
        return c * self.chunk + iota(self.chunk)


def chunk_length(T: int, config: Config) -> int:
    """Tokens in a chunk of a sequence of T: `config.chunk`, or fewer whole pages where T is shorter than that."""
    return min(config.chunk, -(-T // config.page) * config.page)


def chunk_count(T: int, config: Config) -> int:
    """n, the number of chunks of a sequence of T tokens; the last may be partial."""
    return -(-T // chunk_length(T, config))


def top_k(T: int, config: Config) -> TopK | None:
    """The Top-K attention of a sequence of T tokens. None: every query page gets all earlier pages, because attention
    is `Dense` or there are no more pages than K."""
    before_last = (chunk_count(T, config) - 1) * chunk_length(T, config) // config.page
    attention = config.attention
    return attention if isinstance(attention, TopK) and attention.pages < before_last else None


def cut(
    tokens: Int[Array, " T"], labels: Int[Array, " T"], segments: Int[Array, " T"] | None, config: Config
) -> Sequence:
    """Cuts one sequence into chunks."""
    T = tokens.shape[0]
    shape = chunk_count(T, config), chunk_length(T, config)
    pad = (0, shape[0] * shape[1] - T)
    ends = lambda x, **how: jnp.pad(x, pad, **how).reshape(shape)
    return Sequence(
        tokens=ends(tokens),
        labels=ends(labels, constant_values=IGNORE),
        segments=None if segments is None else ends(segments, mode="edge"),
        segment_positions=None if segments is None else ends(segment_positions(segments)),
        length=jnp.int32(T),
    )


def segment_positions(segments: Int[Array, " T"]) -> Int[Array, " T"]:
    """Positions that start at 0 with each segment."""
    index = iota(segments.shape[0])
    first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    return index - lax.cummax(jnp.where(first, index, 0))


def segments_ordered(segments: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Whether segment ids never decrease along a sequence."""
    return jnp.all(segments[:, 1:] >= segments[:, :-1])


def loss_weight(labels: Int[Array, "B T"], dtype: DTypeLike) -> Scalar:
    """What the loss of one token counts in the mean over valid labels: 1 / their number."""
    valid = jnp.sum(labels != IGNORE, dtype=jnp.int32)
    return 1 / jnp.maximum(valid, 1).astype(dtype)


def check_batch(
    tokens: Int[Array, "..."], labels: Int[Array, "..."], segments: Int[Array, "..."] | None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"] | None]:
    """The arguments as [B, T] of int32.

    Raises:
      ValueError: not integers, shapes differ, a sequence is empty, or segments decrease (when their values are known).
    """
    for name, x in (("tokens", tokens), ("labels", labels), ("segments", segments)):
        if x is None:
            continue
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} are {x.dtype}: they must be integers")
        if x.shape != tokens.shape:
            raise ValueError(f"{name} have shape {x.shape}, tokens {tokens.shape}: they must be the same")
    if tokens.ndim not in (1, 2) or 0 in tokens.shape:
        raise ValueError(f"tokens have shape {tokens.shape}: [T] or [B, T] with at least one token")
    if segments is not None and not isinstance(segments, Tracer):
        ids = np.atleast_2d(np.asarray(segments))
        wrong = np.argwhere(ids[:, 1:] < ids[:, :-1])
        if len(wrong):
            row, t = wrong[0]
            raise ValueError(
                f"segments decrease from {ids[row, t]} to {ids[row, t + 1]} at token {t + 1} of sequence {row}: "
                f"number the documents of a sequence in rising order"
            )
    # Not of an unsigned type, in which -1, the mark of "no id", would be the largest id.
    rows = lambda ids: jnp.asarray(ids, jnp.int32).reshape(-1, ids.shape[-1])
    return rows(tokens), rows(labels), None if segments is None else rows(segments)
