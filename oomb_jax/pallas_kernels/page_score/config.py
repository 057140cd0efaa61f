"""Which inputs the GPU kernel takes."""

import jax.numpy as jnp


def unsupported(q, representatives, start) -> str | None:
    """Why the Mosaic kernel cannot take these inputs; None if it can."""
    C, _, H = q.shape
    page = C // start.shape[0]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {q.dtype}, where the kernel takes bfloat16 or float16"
    if representatives.dtype != q.dtype:
        return f"representatives of {representatives.dtype} for queries of {q.dtype}, where the kernel takes one dtype"
    if H not in (64, 128):
        return f"head width {H}, where the kernel takes 64 or 128"
    if page not in (64, 128):
        return f"pages of {page} queries, where the kernel takes 64 or 128"
    return None
