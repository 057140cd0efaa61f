"""Forward kernel in Triton, for NVIDIA GPUs from Ampere on.

A program owns a block of queries of one head and walks over their keys, tile by tile: the pages of its row of the
table, then the chunk's own keys up to the diagonal, with the running softmax of FlashAttention-2 (arXiv 2307.08691).
A tile is part of a page, or several small pages. Pools enter whole, with the layer's number.
"""
# pyright: reportAttributeAccessIssue=false
# Where Triton is not installed, pyright takes this very file for it.

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from oomb_jax.pallas_kernels.paged_attention.triton_config import padded_width, tiles
from oomb_jax.pallas_kernels.triton_call import device_capability, triton_call

LOG2E = tl.constexpr(1.4426950408889634)
"""The softmax runs in powers of two."""


def forward(q, k_new, v_new, k_pool, v_pool, layer, table, *, q_segments, pool_segments, compute_capability=None):
    """See `api.paged_attention`; inputs for which `triton_config.unsupported_triton` gives a reason do not compile.

    compute_capability: of the GPU to compile for, 80 for 8.0; None: of the GPU that is there.
    """
    C, N, H = q.shape
    R = table.shape[0]
    compute_capability = compute_capability or device_capability()
    tile = tiles(Q=C // R, H=H, S=k_pool.shape[3], compute_capability=compute_capability).forward
    rows = row_arguments(layer, table, q_segments, pool_segments)
    (out, lse), _ = triton_call(
        _forward,
        *(q, k_new, v_new, k_pool, v_pool, *rows),
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((N, C), jnp.float32)),
        grid=(N * R * triton.cdiv(C // R, tile.queries),),
        name="paged_attention",
        K=rows[1].shape[1],
        **constants(q, k_pool, R, q_segments is not None, tile, compute_capability),
    )
    return out, lse


def row_arguments(layer, table, q_segments, pool_segments):
    """The layer, the table, the number of pages in each of its rows, and segments."""
    # A table has at least one column, and segments that nobody reads are any array of integers.
    table = jnp.pad(table, ((0, 0), (0, max(0, 1 - table.shape[1]))), constant_values=-1)
    pages = jnp.sum(table >= 0, axis=1, dtype=jnp.int32)
    segments = (pages, pages) if q_segments is None else (q_segments, pool_segments)
    return layer.reshape(1), table, pages, *segments


def constants(q, k_pool, R, segmented, tile, compute_capability) -> dict[str, Any]:
    """What every kernel here takes, letters of `shapes.py` and Q queries in a row, and what Triton's compiler takes."""
    C, N, H = q.shape
    _, P, M, S, _ = k_pool.shape
    shape = {"C": C, "M": M, "G": N // M, "H": H, "S": S, "P": P, "Q": C // R, "SCALE": H**-0.5 * LOG2E.value}
    blocks = {"BLOCK_Q": tile.queries, "BLOCK_U": tile.keys, "BLOCK_H": padded_width(H), "SEGMENTED": segmented}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "compute_capability": compute_capability}
    return shape | blocks | options


@triton.jit
@no_type_check
def place_of_program(C: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query head, key/value head, row of the table and first query of this program.

    Neighbours share keys: the heads of a group, then the blocks of queries, the ones with most own keys first.
    """
    in_row: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    blocks: tl.constexpr = C // Q * in_row
    program = tl.program_id(0)
    kv_head = program // (G * blocks)
    block = blocks - 1 - program // G % blocks
    row = block // in_row
    return kv_head * G + program % G, kv_head, row, row * Q + block % in_row * BLOCK_Q


@triton.jit
@no_type_check
def load_rows(pointer, rows, stride, exists, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a matrix, padded with zeros to BLOCK columns. MASKED: some rows may not exist, they are zero too."""
    columns = tl.arange(0, BLOCK)[None, :]
    pointers = pointer + rows[:, None] * stride + columns
    if MASKED:
        return tl.load(pointers, mask=exists[:, None] & (columns < WIDTH), other=0.0)
    if WIDTH < BLOCK:
        return tl.load(pointers, mask=columns < WIDTH, other=0.0)
    return tl.load(pointers)


@triton.jit
@no_type_check
def store_rows(pointer, rows, stride, exists, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `load_rows` reads."""
    columns = tl.arange(0, BLOCK)[None, :]
    pointers = pointer + rows[:, None] * stride + columns
    tl.store(pointers, values.to(pointer.dtype.element_ty), mask=exists[:, None] & (columns < WIDTH))


@triton.jit
@no_type_check
def page_of_head(layer, page, kv_head, P: tl.constexpr, M: tl.constexpr, S: tl.constexpr, H: tl.constexpr):
    """Where a head's part of a page of the layer begins in a pool."""
    return (((tl.load(layer).to(tl.int64) * P) + page) * M + kv_head) * (S * H)


@triton.jit
@no_type_check
def page_keys(
    k_head, v_head, ids, pages, segments, q_ids, t,
    M: tl.constexpr, H: tl.constexpr, S: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr,
    SEGMENTED: tl.constexpr,
):  # fmt: skip
    """Keys and values of tile t of the pages in a row of the table, and which query sees which of them."""
    position = t * BLOCK_U + tl.arange(0, BLOCK_U)
    exists = position < pages * S
    if S < BLOCK_U:  # a tile of several pages
        page = tl.load(ids + position // S, mask=exists, other=0).to(tl.int64)
        start, rows = 0, page * (M * S) + position % S
    else:
        page = tl.load(ids + t // (S // BLOCK_U)).to(tl.int64)
        start, rows = page * (M * S * H) + t % (S // BLOCK_U) * (BLOCK_U * H), tl.arange(0, BLOCK_U)
    k = load_rows(k_head + start, rows, H, exists, H, BLOCK_H, S < BLOCK_U)
    v = load_rows(v_head + start, rows, H, exists, H, BLOCK_H, S < BLOCK_U)
    visible = exists[None, :]
    if SEGMENTED:
        k_ids = tl.load(segments + page * S + position % S, mask=exists, other=0)
        visible = visible & (q_ids[:, None] == k_ids[None, :])
    return k, v, visible


@triton.jit
@no_type_check
def own_keys(
    k_head, v_head, segments, queries, q_ids, t,
    C: tl.constexpr, M: tl.constexpr, H: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr,
    SEGMENTED: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Keys and values of tile t of the chunk's own, and which query sees which; those past the chunk's end are zero."""
    position = t * BLOCK_U + tl.arange(0, BLOCK_U)
    exists = position < C
    start = t * BLOCK_U * (M * H)
    k = load_rows(k_head + start, tl.arange(0, BLOCK_U), M * H, exists, H, BLOCK_H, DIAGONAL)
    v = load_rows(v_head + start, tl.arange(0, BLOCK_U), M * H, exists, H, BLOCK_H, DIAGONAL)
    visible = queries[:, None] >= position[None, :]
    if SEGMENTED:
        k_ids = tl.load(segments + position, mask=exists, other=0)
        visible = visible & (q_ids[:, None] == k_ids[None, :])
    return k, v, visible


@triton.jit
@no_type_check
def _attend(q, k, v, visible, state, SCALE: tl.constexpr, MASKED: tl.constexpr):
    """The sum of weighted values, the maximum and the total of weights, with one more tile of keys."""
    acc, maximum, total = state
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    larger = tl.maximum(maximum, tl.max(s, axis=1) * SCALE)
    p = tl.exp2(s * SCALE - larger[:, None])
    decay = tl.exp2(maximum - larger)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    return acc, larger, total * decay + tl.sum(p, axis=1)


@triton.jit
@no_type_check
def _forward(
    q, k_new, v_new, k_pool, v_pool, layer, table, pages, q_segments, pool_segments, out, lse,
    SCALE: tl.constexpr, C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr,
    BLOCK_H: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    head, kv_head, row, start = place_of_program(C, G, Q, BLOCK_Q)
    queries = start + tl.arange(0, BLOCK_Q)
    exists = queries < (row + 1) * Q
    q_tile = load_rows(q + head * H, queries, M * G * H, exists, H, BLOCK_H, True)
    q_ids = queries
    if SEGMENTED:
        q_ids = tl.load(q_segments + queries, mask=exists, other=0)
    # The maximum begins above -inf, which a query that has seen no key yet would subtract from itself.
    maximum = tl.full([BLOCK_Q], -1e30, tl.float32)
    state = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32), maximum, tl.zeros([BLOCK_Q], tl.float32)

    ids, count = table + row * K, tl.load(pages + row)
    at = page_of_head(layer, 0, kv_head, P, M, S, H)
    for t in tl.range(0, tl.cdiv(count * S, BLOCK_U)):
        k, v, visible = page_keys(
            k_pool + at, v_pool + at, ids, count, pool_segments, q_ids, t, M, H, S, BLOCK_U, BLOCK_H, SEGMENTED
        )
        state = _attend(q_tile, k, v, visible, state, SCALE, SEGMENTED or S < BLOCK_U)
    k_head, v_head = k_new + kv_head * H, v_new + kv_head * H
    for t in tl.range(0, start // BLOCK_U):
        k, v, visible = own_keys(
            k_head, v_head, q_segments, queries, q_ids, t, C, M, H, BLOCK_U, BLOCK_H, SEGMENTED, False
        )
        state = _attend(q_tile, k, v, visible, state, SCALE, SEGMENTED)
    for t in tl.range(start // BLOCK_U, tl.cdiv(tl.minimum(start + BLOCK_Q, C), BLOCK_U)):
        k, v, visible = own_keys(
            k_head, v_head, q_segments, queries, q_ids, t, C, M, H, BLOCK_U, BLOCK_H, SEGMENTED, True
        )
        state = _attend(q_tile, k, v, visible, state, SCALE, True)

    # A query sees its own key, so total > 0.
    acc, maximum, total = state
    store_rows(out + head * H, queries, M * G * H, exists, acc / total[:, None], H, BLOCK_H)
    tl.store(lse + head * C + queries, (maximum + tl.log2(total)) * (1 / LOG2E), mask=exists)
