"""Tile sizes of the Triton kernels, and which inputs they take."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from oomb_jax.pallas_kernels.triton_call import device_capability, missing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a kernel cuts the work."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    """Tiles in flight."""


def padded_width(H: int) -> int:
    """Columns of a tile for heads of width H: a power of two, as Triton's tiles are."""
    return max(16, 1 << (H - 1).bit_length())


class KernelTiles(NamedTuple):
    """Tiles of the three kernels."""

    forward: Tiles
    dq: Tiles
    dkv: Tiles


def _tiles(queries: int, keys: int, num_warps: int, num_stages: int) -> Tiles:
    return Tiles(queries=queries, keys=keys, num_warps=num_warps, num_stages=num_stages)


# By padded width of a head. On Hopper the fastest of a few on an H200 for width 128; the other widths are not tuned.
# Elsewhere not timed: what compiles for compute capability 8.0 and 8.6 (99 KiB of shared memory a program) with at most
# a few bytes of spilled registers.
HOPPER = {
    64: KernelTiles(_tiles(128, 128, 8, 2), _tiles(64, 64, 4, 2), _tiles(64, 64, 4, 2)),
    128: KernelTiles(_tiles(128, 128, 8, 2), _tiles(64, 64, 4, 2), _tiles(64, 64, 4, 2)),
    256: KernelTiles(_tiles(128, 64, 8, 2), _tiles(64, 64, 8, 2), _tiles(32, 64, 8, 2)),
}
OTHERS = {
    64: KernelTiles(_tiles(128, 64, 8, 3), _tiles(64, 64, 4, 3), _tiles(64, 64, 4, 3)),
    128: KernelTiles(_tiles(128, 64, 8, 3), _tiles(64, 64, 4, 2), _tiles(64, 64, 8, 2)),
    256: KernelTiles(_tiles(64, 32, 8, 2), _tiles(32, 32, 4, 2), _tiles(32, 32, 8, 2)),
}


def tiles(*, Q: int, H: int, S: int, compute_capability: int) -> KernelTiles:
    """Tiles for rows of Q queries, heads of width H and pages of S tokens."""
    found = (HOPPER if compute_capability // 10 == 9 else OTHERS)[max(64, padded_width(H))]
    queries = lambda tile: min(tile.queries, max(16, 1 << (Q - 1).bit_length()))
    forward, dq, dkv = (dataclasses.replace(tile, queries=queries(tile)) for tile in found)
    # A program of dk/dv owns keys of one page.
    return KernelTiles(forward, dq, dataclasses.replace(dkv, keys=min(dkv.keys, S)))


def unsupported_triton(
    q, k_new, v_new, k_pool, v_pool, *gradient_pools, table, window=None, rounding_key=None
) -> str | None:
    """Why the Triton kernels cannot take these inputs here; None if they can."""
    H, S = q.shape[2], k_pool.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {q.dtype}, where the kernels take bfloat16 or float16"
    for name, x in ("k_new", k_new), ("v_new", v_new), ("k_pool", k_pool), ("v_pool", v_pool):
        if x.dtype != q.dtype:
            return f"{name} of {x.dtype} for queries of {q.dtype}, where the kernels take one dtype"
    if q.size >= 2**31:
        return f"queries {q.shape} of 2^31 values or more, where the kernels count in int32"
    if H % 8 or not 16 <= H <= 256:
        return f"head width {H}, where the kernels take multiples of 8 from 16 to 256"
    if S not in (16, 32, 64, 128):
        return f"pages of {S} tokens, where the kernels take 16, 32, 64 or 128"
    for x in gradient_pools:
        if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"a gradient pool of {x.dtype}, where the kernels take float32 or bfloat16"
    if table.ndim > 2:
        return "a list of pages for each key/value head"
    if window is not None:
        return "a sliding window, which only the reference has"
    if rounding_key is not None:
        return "a rounding_key, where the kernels round to nearest"
    if device_capability() < 80:
        return "no NVIDIA GPU of compute capability 8.0 or higher"
    return missing()
