"""Tile sizes of the GPU kernels, and which inputs the kernels take."""

import dataclasses

import jax.numpy as jnp

from oomb_jax.pallas_kernels.device import ROWS, SHARED_MEMORY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the kernels cut the work. A page is always one key tile, so only depth and query tiles are free."""

    warpgroups: int
    """Warpgroups that compute, in the kernels that own queries: 64 queries each."""
    stages: int
    """Key tiles in flight, forward."""
    dq_stages: int
    """Key tiles in flight, gradient of the queries."""
    dkv_stages: int
    """Query tiles in flight, gradient of keys and values."""


def tiles(*, queries: int, H: int, S: int) -> Tiles:
    """Tiles for rows of `queries` queries, head width H and pages of S tokens."""
    warpgroups = 2 if queries % (2 * ROWS) == 0 else 1
    query_tile, key_tiles = 2 * warpgroups * ROWS * H, 2 * (2 * S * H)  # bytes of 16-bit values
    # A KiB per array is lost to alignment, two are left to barriers.
    fit = lambda free, tile: max(2, min(4, (free - 6 * 1024) // tile))
    return Tiles(
        warpgroups=warpgroups,
        # 128 KiB on their way hide the latency; a third stage of pages of 128 costs 6 % of speed (measured, H200).
        stages=min(4, 128 * 1024 // key_tiles),
        dq_stages=fit(SHARED_MEMORY - 2 * query_tile, key_tiles),
        dkv_stages=fit(SHARED_MEMORY - key_tiles, 2 * (2 * ROWS * H + 4 * ROWS)),
    )


def unsupported(q, k_new, v_new, k_pool, v_pool, table, window) -> str | None:
    """Why the Mosaic kernels cannot take these inputs; None if they can."""
    C, _, H = q.shape
    S, R = k_pool.shape[3], table.shape[0]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {q.dtype}, where the kernels take bfloat16 or float16"
    for name, x in ("k_new", k_new), ("v_new", v_new), ("k_pool", k_pool), ("v_pool", v_pool):
        if x.dtype != q.dtype:
            return f"{name} of {x.dtype} for queries of {q.dtype}, where the kernels take one dtype"
    if H not in (64, 128):
        return f"head width {H}, where the kernels take 64 or 128"
    if S not in (64, 128):
        return f"pages of {S} tokens, where the kernels take 64 or 128"
    if R > 1 and (C % S or (C // R) % ROWS):
        return f"{C} queries in {R} rows and pages of {S}, where the kernels take whole pages and rows of whole {ROWS}s"
    if window is not None:
        return "a sliding window, which only the reference has"
    return None


def unsupported_gradients(dk_pool, dv_pool) -> str | None:
    """Why the Mosaic kernels cannot add to these gradient pools; None if they can."""
    for name, x in ("dk_pool", dk_pool), ("dv_pool", dv_pool):
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} of {x.dtype}, where the kernels take float32 or bfloat16"
    return None
