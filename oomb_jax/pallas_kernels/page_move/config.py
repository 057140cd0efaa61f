"""How the movers cut the work, and which inputs they take."""

import jax.numpy as jnp

from oomb_jax.pallas_kernels.triton_call import device_capability, missing

PROGRAMS = 16
"""Enough to keep PCIe busy on an H200, where a page takes about 1.5 us to arrive: at 48 GiB/s 75 KiB are on their way
at any time."""

BLOCK_BYTES = 32 * 1024
"""What a program asks for at once: 8 loads of 16 bytes by each thread."""

AHEAD = 3
"""Blocks that it has asked for before it works at one. They come into 96 KiB of shared memory, which every GPU has."""

LINK_FETCHERS, LINK_ADDERS = 4, 8
"""For pools in host memory beside products that spare so many multiprocessors: four fetch as fast as 16 when alone. A
program that adds has at most half as much of the pool on its way, as its values come too; eight of them cost products
no more than four."""

WARPS = 8


def block(count: int, itemsize: int) -> int:
    """Elements that a program moves at once, of `count` contiguous ones: a power of two, as Triton's blocks are.
    itemsize: bytes of all that it asks for of one element."""
    return min(1 << (BLOCK_BYTES // itemsize).bit_length() - 1, 1 << (count - 1).bit_length())


def unsupported_triton(pool, pages, dtype) -> str | None:
    """Why the Triton kernels cannot move pages of the pool as, or from, `dtype` here; None if they can."""
    M, S, H = pool.shape[2:]
    if pool.dtype.itemsize > 4 or jnp.dtype(dtype).itemsize > 4:
        return f"a pool of {pool.dtype} moved as {jnp.dtype(dtype)}, where the kernels take up to 4 bytes"
    if S * H * pool.dtype.itemsize % 16:
        return f"{S} x {H} values of {pool.dtype}, where the kernels take multiples of 16 bytes"
    if len(pages) * M * S * H >= 2**31:
        return f"{len(pages)} pages of {M} x {S} x {H} values, where the kernels count less than 2^31 of them"
    if device_capability() < 80:
        return "no NVIDIA GPU of compute capability 8.0 or higher"
    return missing()
