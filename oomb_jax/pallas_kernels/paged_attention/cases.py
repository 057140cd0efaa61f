"""Shapes and settings on which every implementation is tested and measured."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from oomb_jax.pallas_kernels.paged_attention.api import Window
from oomb_jax.shapes import accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the operation."""

    C: int
    """Queries of the chunk."""
    M: int
    """Key/value heads."""
    G: int
    """Query heads per key/value head."""
    H: int
    """Head width."""
    S: int
    """Tokens in a page."""
    earlier: int
    """Pages that each row of the table names."""
    rows: int = 1
    """R, rows of the table."""
    by_head: bool = False
    """Whether each key/value head has lists of its own."""
    spare: int = 3
    """Pages of the pool that no row names, and entries of padding in a row."""
    L: int = 2
    """Layers of the pools."""
    segments: bool = False
    strangers: bool = False
    """With segments: no document of the chunk is in a page."""
    partial: bool = False
    """Pages hold fewer than S tokens."""
    window: int | None = None
    """Tokens of a sliding window over pages in random order."""
    sinks: bool = False
    dtype: DTypeLike = "float32"
    pool_dtype: DTypeLike | None = None
    """dtype of the key/value pools; None: `dtype`."""
    gradient_dtype: DTypeLike | None = None
    """dtype of the gradient pools; None: float32, or float64 for float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Random arguments of one call, forward and backward. Pages hold NaN for heads for which no row names them."""

    forward: tuple[Array, ...]
    """q, k_new, v_new, k_pool, v_pool, layer, table."""
    dk_pool: Array
    dv_pool: Array
    d_out: Array
    masks: dict[str, Any]
    """q_segments, pool_segments, page_lengths and window, where the case has them."""
    sinks: dict[str, Array]
    """sinks, where the case has them."""


def inputs(case: Case, seed: int) -> Inputs:
    """Random inputs of a case."""
    rng = np.random.default_rng(seed)
    heads = case.M if case.by_head else 1
    N, P = case.M * case.G, case.rows * heads * case.earlier + case.spare

    def draw(*shape, dtype=case.dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    # Lists of different lengths, ids of a list rising and distinct; with one list, page 0 stays unnamed too.
    table = np.full((case.rows, heads, case.earlier + case.spare), -1, np.int32)
    for pages in table.reshape(case.rows * heads, -1):
        count = case.earlier if case.rows * heads == 1 else int(rng.integers(case.earlier + 1))
        pages[:count] = np.sort(rng.choice(np.arange(1, P), size=count, replace=False))
    unnamed = np.setdiff1d(np.arange(P), table)
    for_head = named(table, P, case.M)
    pool = case.L, P, case.M, case.S, case.H
    hide = lambda pool: jnp.where(for_head[None, :, :, None, None], pool, jnp.nan)
    k_pool, v_pool = (hide(draw(*pool, dtype=case.pool_dtype or case.dtype)) for _ in range(2))
    masks: dict[str, Any] = {}
    if case.segments:
        # Documents begin anywhere, about three in the pages and two in the chunk; later pages hold later documents. One
        # goes from the middle of the last page that some row names to the first query of that row.
        rates = np.repeat((3 / (P * case.S), 2 / case.C), (P * case.S, case.C))
        row = int(np.argmax(table.max(axis=(1, 2)) >= 0))
        first_query = P * case.S + row * (case.C // case.rows)
        rates[max(0, int((table[row].max() + 0.5) * case.S)) : first_query + 1] = 0
        ids = np.cumsum(rng.random(len(rates)) < rates)
        ids[-case.C :] += case.strangers
        masks["q_segments"] = jnp.asarray(ids[-case.C :], jnp.int32)
        masks["pool_segments"] = jnp.asarray(ids[: -case.C].reshape(P, case.S), jnp.int32)
    if case.partial:
        lengths = rng.integers(case.S + 1, size=P)
        lengths[unnamed] = case.S
        masks["page_lengths"] = jnp.asarray(lengths, jnp.int32)
        page, offset = np.nonzero(np.arange(case.S) >= lengths[:, None])
        k_pool, v_pool = (pool.at[:, page, :, offset].set(1e3) for pool in (k_pool, v_pool))
    if case.window is not None:
        starts = jnp.asarray(rng.permutation(P) * case.S, jnp.int32)
        masks["window"] = Window(jnp.int32(case.window), jnp.int32(P * case.S), starts)
    return Inputs(
        forward=(
            *(draw(case.C, heads, case.H) for heads in (N, case.M, case.M)),
            *(k_pool, v_pool, jnp.int32(rng.integers(case.L)), jnp.asarray(table if case.by_head else table[:, 0])),
        ),
        dk_pool=draw(*pool, dtype=case.gradient_dtype or accumulator(case.dtype)),
        dv_pool=draw(*pool, dtype=case.gradient_dtype or accumulator(case.dtype)),
        d_out=draw(case.C, N, case.H),
        masks=masks,
        sinks={"sinks": draw(N, dtype=accumulator(case.dtype))} if case.sinks else {},
    )


def named(table: Any, P: int, M: int) -> np.ndarray:
    """[P, M]: the pages that a table of any kind names, by key/value head."""
    lists = np.broadcast_to(
        np.asarray(table).reshape(len(table), -1, table.shape[-1]), (len(table), M, table.shape[-1])
    )
    result = np.zeros((P, M), bool)
    for head in range(M):
        result[lists[:, head][lists[:, head] >= 0], head] = True
    return result


SMALL = (
    Case(C=16, M=1, G=1, H=8, S=8, earlier=0, window=5),
    Case(C=16, M=2, G=3, H=96, S=8, earlier=5, partial=True),
    Case(C=24, M=1, G=7, H=16, S=8, earlier=9, segments=True, strangers=True, sinks=True),
    Case(C=32, M=2, G=2, H=256, S=16, earlier=3, rows=2, window=43),
    Case(C=32, M=1, G=16, H=8, S=16, earlier=4, rows=2, segments=True, partial=True, window=57, sinks=True),
    Case(C=24, M=3, G=2, H=8, S=8, earlier=5, rows=3, by_head=True, segments=True, window=61),
)
"""For a CPU, in seconds."""

INTERPRETED = (
    Case(C=77, M=2, G=3, H=64, S=64, earlier=2, by_head=True, spare=1, dtype="bfloat16"),
    Case(C=128, M=1, G=2, H=64, S=64, earlier=3, rows=2, segments=True, dtype="float16"),
    Case(C=256, M=1, G=1, H=128, S=128, earlier=1, rows=2, dtype="bfloat16", gradient_dtype="bfloat16"),
    Case(C=128, M=1, G=1, H=128, S=128, earlier=0, dtype="bfloat16"),
    Case(C=128, M=2, G=1, H=64, S=64, earlier=3, rows=2, by_head=True, spare=1, dtype="bfloat16"),
    Case(C=64, M=1, G=2, H=64, S=64, earlier=1, segments=True, strangers=True, dtype="bfloat16"),
)
"""The smallest that the Mosaic kernels take, for their interpreter."""


def _gpu() -> tuple[Case, ...]:
    """Every head width, page and dtype with every kind of table and group; then what is left."""
    cases = []
    for H in 64, 128:
        for S in 64, 128:
            for dtype in "bfloat16", "float16":
                some = functools.partial(Case, H=H, S=S, dtype=dtype)
                cases += [
                    some(C=4 * S, M=2, G=7, earlier=9),
                    some(C=4 * S, M=1, G=16, earlier=2, segments=True),
                    some(C=5 * S, M=2, G=1, earlier=6, rows=5),
                    some(C=4 * S, M=1, G=7, earlier=11, rows=4, segments=True),
                    some(C=6 * S, M=1, G=3, earlier=4, rows=3, gradient_dtype="bfloat16"),
                ]
    common = {"H": 128, "S": 128, "dtype": "bfloat16"}
    return (
        *cases,
        Case(C=512, M=4, G=7, earlier=0, **common),  # the first chunk of a sequence
        Case(C=128, M=4, G=7, earlier=40, spare=1, **common),  # one program per head
        Case(C=1024, M=1, G=5, earlier=1, rows=8, spare=7, **common),  # pages that most rows share, much padding
        Case(C=1024, M=1, G=2, earlier=24, rows=8, spare=40, **common),  # every page by about one row
        Case(C=64, M=2, G=6, H=64, S=64, earlier=5, dtype="bfloat16"),  # rows of 64 queries, one warpgroup
        Case(C=1, M=2, G=4, H=64, S=64, earlier=3, dtype="float16"),  # chunks that are no whole pages
        Case(C=1001, M=2, G=7, earlier=9, segments=True, **common),
        Case(C=512, M=2, G=3, earlier=9, partial=True, sinks=True, **common),
        Case(C=512, M=2, G=4, earlier=5, segments=True, strangers=True, **common),
        Case(C=384, M=3, G=2, H=128, S=64, earlier=17, rows=3, segments=True, dtype="bfloat16"),
        Case(C=1024, M=4, G=7, earlier=12, rows=8, by_head=True, spare=5, **common),
        Case(C=640, M=2, G=3, earlier=5, rows=5, by_head=True, segments=True, gradient_dtype="bfloat16", **common),
        Case(C=300, M=2, G=2, H=64, S=64, earlier=9, by_head=True, dtype="float16"),
    )


GPU = _gpu()
"""For the kernels on a GPU."""
