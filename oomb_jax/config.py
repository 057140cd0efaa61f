"""Settings of the method: how a sequence is cut, what attends to what, what is kept and in which dtype."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from oomb_jax.pallas_kernels.matmul import Implementation as Product
from oomb_jax.pallas_kernels.page_move.api import FLOAT8
from oomb_jax.pallas_kernels.paged_attention.api import Implementation
from oomb_jax.selection import TopK

Remat = Literal["none", "dots", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """Every query attends to every earlier token of its segment: the gradient equals that of full attention."""


Attention = Dense | TopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the method, all static under `jax.jit`. The result does not depend on any of them but `attention`,
    up to rounding."""

    chunk: int = 4096
    """Tokens that pass through the layers together: a multiple of `page`. Activation memory is that of one chunk."""

    page: int = 128
    """Tokens in a page of the key/value pools."""

    attention: Attention = dataclasses.field(default_factory=Dense)
    """Which earlier tokens a query attends to: `Dense()`, or `TopK()` with its settings."""

    remat: Remat = "dots"
    """What the recomputed chunk keeps for its backward pass: `"none"` recomputes nothing and keeps every intermediate,
    `"dots"` keeps the results of matrix products, `"full"` keeps only the inputs of each half layer."""

    grad_dtype: DTypeLike | None = None
    """dtype of the returned gradients, which are summed in it; not float16. None: float32 (float64 for a float64
    model)."""

    kv_dtype: DTypeLike | None = None
    """dtype of the key and value pools. None: the model's. `"float8_e4m3fn"` takes half the memory of bfloat16, with a
    scale for each page and head; not for float16 models."""

    kv_grad_dtype: DTypeLike | None = None
    """dtype of the key and value gradient pools; not float16. None: float32 (float64 for a float64 model)."""

    kv_grad_pages: int | None = None
    """With `TopK`, pages of a layer that the key and value gradient pools have room for, where pages are fetched (pools
    in host memory or in float8): only those between the last chunk that chose them and their own hold a gradient.
    `gradient_slots.most_at_once(pools.selection)` counts them after a call; with less room loss and gradients are NaN.
    None: all pages."""

    hbm_layers: int | None = None
    """Layers, from the first, whose pools stay in the GPU's memory; those of the others are in pinned host memory.
    None: all layers."""

    implementation: Implementation | None = None
    """Which attention runs: `"mosaic"`, the kernels for Hopper GPUs, `"triton"`, those for GPUs from Ampere on, or
    `"reference"`. A named one never falls back. None: the first of them that can run; on a GPU it logs once which."""

    matmul: Product | None = None
    """How the layers' products are computed that a model writes as `oomb_jax.matmul`: `"mosaic"`, a kernel for Hopper
    GPUs, where it takes the operands (on another device it is refused), or `"reference"`, by XLA. None: on Hopper GPUs
    the kernel in layers whose pools are in host memory, where it leaves multiprocessors to the movers; elsewhere by
    XLA. The kernel rounds before a residual or bias is added; XLA may add it first."""

    def __post_init__(self):
        if self.page < 8:
            raise ValueError(f"page={self.page}: a page holds at least 8 tokens; the GPU kernels take 64 or 128")
        if self.chunk < self.page or self.chunk % self.page:
            below = max(self.page, self.chunk // self.page * self.page)
            raise ValueError(
                f"chunk={self.chunk}: a chunk is a multiple of page={self.page}; the nearest that fits is {below}"
            )
        if not isinstance(self.attention, Attention):
            raise ValueError(f"attention={self.attention!r}: Dense() or TopK()")
        if self.kv_grad_pages is not None and (self.kv_grad_pages < 1 or isinstance(self.attention, Dense)):
            raise ValueError(f"kv_grad_pages={self.kv_grad_pages}: at least 1, and with TopK attention alone")
        if self.hbm_layers is not None and self.hbm_layers < 0:
            raise ValueError(f"hbm_layers={self.hbm_layers}: at least 0")
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat={self.remat!r}: one of 'none', 'dots', 'full'")
        if self.implementation not in (None, *get_args(Implementation)):
            raise ValueError(f"implementation={self.implementation!r}: None, or one of {get_args(Implementation)}")
        if self.matmul not in (None, *get_args(Product)):
            raise ValueError(f"matmul={self.matmul!r}: None, or one of {get_args(Product)}")
        for name in ("grad_dtype", "kv_dtype", "kv_grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None:
                # Equal settings must be equal and hashable however the dtype was spelt.
                object.__setattr__(self, name, _float_dtype(name, dtype))


def _float_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if name == "kv_dtype" and dtype == FLOAT8:
        return dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        narrow = ", or 'float8_e4m3fn'" if name == "kv_dtype" else ""
        raise ValueError(
            f"{name}={dtype}: a floating-point dtype of 16 bits or more, such as 'bfloat16' or 'float32'{narrow}"
        )
    if "grad" in name and dtype == jnp.float16:
        # A token's share is the reciprocal of their number, and float16 ends at 2**-24.
        raise ValueError(f"{name}=float16: gradients of a long sequence are too small for it; use 'bfloat16'")
    return dtype
