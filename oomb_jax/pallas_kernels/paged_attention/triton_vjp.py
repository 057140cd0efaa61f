"""Backward kernels in Triton. The formulas and the two sweeps are those of `mosaic_vjp`: one kernel owns queries and
walks over their keys, the other owns keys and walks over the queries that attend to them. No atomics, so results repeat
bit for bit.
"""
# pyright: reportAttributeAccessIssue=false
# Where Triton is not installed, pyright takes the file beside this one for it.

from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from oomb_jax.pallas_kernels.paged_attention.page_lists import by_head, invert
from oomb_jax.pallas_kernels.paged_attention.triton import (
    LOG2E,
    constants,
    load_rows,
    own_keys,
    page_keys,
    page_of_head,
    place_of_program,
    row_arguments,
    store_rows,
)
from oomb_jax.pallas_kernels.paged_attention.triton_config import tiles
from oomb_jax.pallas_kernels.triton_call import device_capability, triton_call


def backward(
    q,
    k_new,
    v_new,
    k_pool,
    v_pool,
    dk_pool,
    dv_pool,
    layer,
    table,
    out,
    lse,
    d_out,
    *,
    q_segments,
    pool_segments,
    by_page=None,
    compute_capability=None,
):
    """See `api.paged_attention_vjp`. Narrow gradient pools are added to in float32 and rounded once, to nearest."""
    queries = q, d_out, lse * LOG2E.value, jnp.einsum("cnh,cnh->nc", out, d_out, preferred_element_type=jnp.float32)
    keys = k_new, v_new, k_pool, v_pool
    layer, table, pages, *segments = row_arguments(layer, table, q_segments, pool_segments)
    compute_capability = compute_capability or device_capability()
    shapes = {"Q": q.shape[0] // table.shape[0], "H": q.shape[2], "S": k_pool.shape[3]}
    tile = tiles(**shapes, compute_capability=compute_capability)
    options = {"segmented": q_segments is not None, "compute_capability": compute_capability}
    dq = query_gradient(*queries, *keys, layer, table, pages, *segments, **options, tile=tile.dq)
    inverted = invert(by_head(table), k_pool.shape[1]) if by_page is None else by_page.queries
    lists = (x.reshape(-1) for x in inverted)
    dk_new, dv_new, dk_pool, dv_pool = key_gradients(
        *(*queries, *keys, layer, *lists, *segments, dk_pool, dv_pool),
        **options,
        R=table.shape[0],
        tile=tile.dkv,
    )
    return dq, dk_new, dv_new, dk_pool, dv_pool


def query_gradient(*arguments, segmented, compute_capability, tile):
    """dq; arguments: the first of those of the kernel `_query_gradient`."""
    q, k_pool, table = arguments[0], arguments[6], arguments[9]
    C, N, _ = q.shape
    R = table.shape[0]
    (dq,), _ = triton_call(
        _query_gradient,
        *arguments,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        grid=(N * R * triton.cdiv(C // R, tile.queries),),
        name="paged_attention_dq",
        K=table.shape[1],
        **constants(q, k_pool, R, segmented, tile, compute_capability),
    )
    return dq


def key_gradients(*arguments, R, segmented, compute_capability, tile):
    """dk_new, dv_new and the gradient pools; arguments: the first of those of the kernel `_key_gradients`."""
    *inputs, dk_pool, dv_pool = arguments
    q, k_new, k_pool, pages = inputs[0], inputs[4], inputs[6], inputs[9]
    C = q.shape[0]
    M, S = k_pool.shape[2:4]
    own, listed = triton.cdiv(C, tile.keys), pages.shape[0] * (S // tile.keys)
    gradient = jax.ShapeDtypeStruct(k_new.shape, jnp.float32)
    new, pools = triton_call(
        _key_gradients,
        *inputs,
        in_place=(dk_pool, dv_pool),
        out_type=(gradient, gradient),
        grid=(M * (own + listed),),
        name="paged_attention_dkv",
        OWN=own,
        LISTED=listed,
        **constants(q, k_pool, R, segmented, tile, compute_capability),
    )
    return *new, *pools


@triton.jit
@no_type_check
def _add_keys(of_queries, k, v, visible, dq, SCALE: tl.constexpr, MASKED: tl.constexpr):
    """dq, still without its factor, with the share of one more tile of keys."""
    q, d_out, lse, delta = of_queries
    s = tl.dot(q, tl.trans(k))
    dp = tl.dot(d_out, tl.trans(v))
    p = tl.exp2(s * SCALE - lse[:, None])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
@no_type_check
def _query_gradient(
    q, d_out, lse, delta, k_new, v_new, k_pool, v_pool, layer, table, pages, q_segments, pool_segments, dq,
    SCALE: tl.constexpr, C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr,
    BLOCK_H: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    head, kv_head, row, start = place_of_program(C, G, Q, BLOCK_Q)
    queries = start + tl.arange(0, BLOCK_Q)
    exists = queries < (row + 1) * Q
    q_tile = load_rows(q + head * H, queries, M * G * H, exists, H, BLOCK_H, True)
    do_tile = load_rows(d_out + head * H, queries, M * G * H, exists, H, BLOCK_H, True)
    lse_tile = tl.load(lse + head * C + queries, mask=exists, other=0.0)
    delta_tile = tl.load(delta + head * C + queries, mask=exists, other=0.0)
    of_queries = q_tile, do_tile, lse_tile, delta_tile
    q_ids = queries
    if SEGMENTED:
        q_ids = tl.load(q_segments + queries, mask=exists, other=0)
    acc = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)

    ids, count = table + row * K, tl.load(pages + row)
    at = page_of_head(layer, 0, kv_head, P, M, S, H)
    for t in tl.range(0, tl.cdiv(count * S, BLOCK_U)):
        k, v, visible = page_keys(
            k_pool + at, v_pool + at, ids, count, pool_segments, q_ids, t, M, H, S, BLOCK_U, BLOCK_H, SEGMENTED
        )
        acc = _add_keys(of_queries, k, v, visible, acc, SCALE, SEGMENTED or S < BLOCK_U)
    k_head, v_head = k_new + kv_head * H, v_new + kv_head * H
    for t in tl.range(0, start // BLOCK_U):
        k, v, visible = own_keys(
            k_head, v_head, q_segments, queries, q_ids, t, C, M, H, BLOCK_U, BLOCK_H, SEGMENTED, False
        )
        acc = _add_keys(of_queries, k, v, visible, acc, SCALE, SEGMENTED)
    for t in tl.range(start // BLOCK_U, tl.cdiv(tl.minimum(start + BLOCK_Q, C), BLOCK_U)):
        k, v, visible = own_keys(
            k_head, v_head, q_segments, queries, q_ids, t, C, M, H, BLOCK_U, BLOCK_H, SEGMENTED, True
        )
        acc = _add_keys(of_queries, k, v, visible, acc, SCALE, True)
    store_rows(dq + head * H, queries, M * G * H, exists, acc * (SCALE / LOG2E), H, BLOCK_H)


@triton.jit
@no_type_check
def _add_queries(
    of_keys, of_queries, rows, first, lower, upper, kv_head, dk, dv,
    SCALE: tl.constexpr, C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, Q: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, SEGMENTED: tl.constexpr, OWN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """dk and dv with the share of steps lower .. upper - 1, each a block of queries of one head of the group.

    OWN: blocks count from `first` on in the chunk; else through the rows of the table that `rows` points to.
    """
    k, v, keys, k_ids = of_keys
    q, d_out, lse, delta, q_segments = of_queries
    in_row: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    UNEVEN: tl.constexpr = (C if OWN else Q) % BLOCK_Q != 0
    inside = tl.arange(0, BLOCK_Q)
    for t in tl.range(lower, upper):
        head, block = kv_head * G + t % G, t // G
        if OWN:
            start, end = (first + block) * BLOCK_Q, C
        else:
            row = tl.load(rows + block // in_row)
            start, end = row * Q + block % in_row * BLOCK_Q, (row + 1) * Q
        queries = start + inside
        exists = queries < end
        at = (start * (M * G) + head) * H
        q_tile = load_rows(q + at, inside, M * G * H, exists, H, BLOCK_H, UNEVEN)
        # Queries that do not exist have no weight.
        lse_tile = tl.load(lse + head * C + queries, mask=exists, other=float("inf"))
        p = tl.exp2(tl.dot(k, tl.trans(q_tile)) * SCALE - lse_tile[None, :])
        if DIAGONAL:
            p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
        if SEGMENTED:
            q_ids = tl.load(q_segments + queries, mask=exists, other=0)
            p = tl.where(q_ids[None, :] == k_ids[:, None], p, 0.0)
        do_tile = load_rows(d_out + at, inside, M * G * H, exists, H, BLOCK_H, UNEVEN)
        dp = tl.dot(v, tl.trans(do_tile))
        dv = tl.dot(p.to(v.dtype), do_tile, dv)
        delta_tile = tl.load(delta + head * C + queries, mask=exists, other=0.0)
        dk = tl.dot((p * (dp - delta_tile[None, :])).to(k.dtype), q_tile, dk)
    return dk, dv


@triton.jit
@no_type_check
def _key_gradients(
    q, d_out, lse, delta, k_new, v_new, k_pool, v_pool, layer, pages, firsts, counts, rows, q_segments, pool_segments,
    dk_pool, dv_pool, dk_new, dv_new, dk_pool_again, dv_pool_again,
    OWN: tl.constexpr, LISTED: tl.constexpr, SCALE: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, H: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    # A head's queries stay in the cache while its keys pass. Own keys first: their work differs most.
    kv_head, item = tl.program_id(0) // (OWN + LISTED), tl.program_id(0) % (OWN + LISTED)
    of_queries = q, d_out, lse, delta, q_segments
    inside = tl.arange(0, BLOCK_U)
    dk = tl.zeros([BLOCK_U, BLOCK_H], tl.float32)
    dv = tl.zeros([BLOCK_U, BLOCK_H], tl.float32)
    if item < OWN:
        keys = item * BLOCK_U + inside
        exists = keys < C
        k = load_rows(k_new + kv_head * H, keys, M * H, exists, H, BLOCK_H, True)
        v = load_rows(v_new + kv_head * H, keys, M * H, exists, H, BLOCK_H, True)
        k_ids = keys
        if SEGMENTED:
            k_ids = tl.load(q_segments + keys, mask=exists, other=0)
        of_keys = k, v, keys, k_ids
        first = item * BLOCK_U // BLOCK_Q
        steps = (tl.cdiv(C, BLOCK_Q) - first) * G
        diagonal = tl.minimum((tl.cdiv((item + 1) * BLOCK_U, BLOCK_Q) - first) * G, steps)
        dk, dv = _add_queries(
            of_keys, of_queries, rows, first, 0, diagonal, kv_head, dk, dv,
            SCALE, C, M, G, H, Q, BLOCK_Q, BLOCK_H, SEGMENTED, True, True,
        )  # fmt: skip
        dk, dv = _add_queries(
            of_keys, of_queries, rows, first, diagonal, steps, kv_head, dk, dv,
            SCALE, C, M, G, H, Q, BLOCK_Q, BLOCK_H, SEGMENTED, True, False,
        )  # fmt: skip
        store_rows(dk_new + kv_head * H, keys, M * H, exists, dk * (SCALE / LOG2E), H, BLOCK_H)
        store_rows(dv_new + kv_head * H, keys, M * H, exists, dv, H, BLOCK_H)
    else:
        listed = (item - OWN) // (S // BLOCK_U)
        count = tl.load(counts + listed)
        if count > 0:
            exists = inside < BLOCK_U
            page = tl.load(pages + listed).to(tl.int64)
            start = (item - OWN) % (S // BLOCK_U) * BLOCK_U
            at = page_of_head(layer, page, kv_head, P, M, S, H) + start * H
            k = load_rows(k_pool + at, inside, H, exists, H, BLOCK_H, False)
            v = load_rows(v_pool + at, inside, H, exists, H, BLOCK_H, False)
            k_ids = inside
            if SEGMENTED:
                k_ids = tl.load(pool_segments + page * S + start + inside)
            steps = count * ((Q + BLOCK_Q - 1) // BLOCK_Q * G)
            dk, dv = _add_queries(
                (k, v, inside, k_ids), of_queries, rows + tl.load(firsts + listed), 0, 0, steps, kv_head, dk, dv,
                SCALE, C, M, G, H, Q, BLOCK_Q, BLOCK_H, SEGMENTED, False, False,
            )  # fmt: skip
            dk = dk * (SCALE / LOG2E) + load_rows(dk_pool + at, inside, H, exists, H, BLOCK_H, False).to(tl.float32)
            store_rows(dk_pool + at, inside, H, exists, dk, H, BLOCK_H)
            dv += load_rows(dv_pool + at, inside, H, exists, H, BLOCK_H, False).to(tl.float32)
            store_rows(dv_pool + at, inside, H, exists, dv, H, BLOCK_H)
