"""The key/value pools and their gradient pools: made once, passed through every step, updated in place by donation."""

import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from oomb_jax.config import Config
from oomb_jax.gradient_slots import GradientSlots, all_free
from oomb_jax.pallas_kernels.page_move.api import FLOAT8
from oomb_jax.parts import key_shape, layer_count
from oomb_jax.sequence import chunk_count, chunk_length, top_k
from oomb_jax.shapes import Pool, accumulator

PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""GiB of host memory that JAX may pin."""

PINNED_DEFAULT = 64
"""What it is where nobody says."""

PAGE_ARRAYS = ("k", "v", "dk", "dv")
"""Fields of `LayerPools` that lie in host memory where the layers do; the others are on the device."""


class LayerPools(NamedTuple):
    """Keys, values and their gradients of every page of some layers."""

    k: Pool
    v: Pool
    dk: Pool
    dv: Pool
    slots: GradientSlots | None = None
    """Where the gradients lie in dk and dv. None: the layers are not `staged`, every page is where its number says, and
    a step begins with gradients of 0."""
    k_scale: Float32[Array, "layers P M"] | None = None
    """Of float8 keys, the power of two that a page and head is multiplied by; on the device, wherever the pages are."""
    v_scale: Float32[Array, "layers P M"] | None = None

    @property
    def staged(self) -> bool:
        """Whether kernels work on copies of the pages: in host memory they cannot read them, and not in float8."""
        return self.slots is not None

    @property
    def gradient_pages(self) -> int:
        """Pages that may get a gradient."""
        return self.dk.shape[1] if self.slots is None else self.slots.of_page.shape[1]


class Pools(NamedTuple):
    """The pools of all layers. The content before a step does not matter: a step overwrites or clears what it reads."""

    hbm: LayerPools | None
    """Of the first layers, in the memory of the device."""
    host: LayerPools | None
    """Of the others, in pinned host memory."""
    selection: Int[Array, "n L R *M K"] | None = None
    """The pages that each chunk, layer and query page chose, with Top-K attention."""
    mass: Float[Array, "L 2"] | None = None
    """Of some queries of the last chunk, the probability that dense attention would give to the chosen pages, and to
    all earlier ones."""

    @property
    def any_layers(self) -> LayerPools:
        """Pools of some layers: all have the same pages."""
        layers = self.hbm or self.host
        assert layers is not None
        return layers

    @property
    def pages(self) -> int:
        """P, pages of a layer."""
        return self.any_layers.k.shape[1]

    @property
    def page(self) -> int:
        """S, tokens in a page."""
        return self.any_layers.k.shape[3]


def create_pools(model: Any, ctx: int, config: Config, *, gradients: bool = True) -> Pools:
    """Pools for sequences of up to `ctx` tokens.

    Args:
      model: a model as `oomb_jax.models` makes it, or its `jax.eval_shape`: only shapes are read.
      ctx: tokens of the longest sequence, rounded up to whole chunks.
      config: `page`, `chunk`, `attention`, `kv_dtype`, `kv_grad_dtype`, `kv_grad_pages` and `hbm_layers` matter.
      gradients: False leaves out what only a reverse pass needs: the gradient pools have no pages, and no selection is
        kept. For `token_losses`.

    Returns:
      Pools of 2·L·P·M·S·H elements of `kv_dtype`, and as many of `kv_grad_dtype`, or fewer by `kv_grad_pages`. For
      Top-K attention P·L·K int32 more, for float8 2·L·P·M float32. Those in host memory are not initialised.

    Raises:
      ValueError: ctx is below 1, the model has fewer layers than `hbm_layers`, float8 for a float16 model, or more
        in host memory than JAX may pin (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB).
    """
    shapes = jax.eval_shape(lambda: _pools(model, ctx, config, gradients))
    if shapes.host is not None and _device().platform == "gpu":
        away = [getattr(shapes.host, name) for name in PAGE_ARRAYS]
        size = sum(pool.size * pool.dtype.itemsize for pool in away)
        check_pinned(size)
        _take_region(size)
    return _pools(model, ctx, config, gradients)


def _pools(model: Any, ctx: int, config: Config, gradients: bool) -> Pools:
    """`create_pools` without a look at what JAX may pin, which does not matter for shapes."""
    if ctx < 1:
        raise ValueError(f"ctx={ctx}: a sequence has at least one token")
    keys, L = key_shape(model), layer_count(model.layers)
    _, M, H = keys.shape
    P = chunk_count(ctx, config) * chunk_length(ctx, config) // config.page
    resident = L if config.hbm_layers is None else config.hbm_layers
    if resident > L:
        raise ValueError(f"hbm_layers={resident}: the model has {L}; None keeps the pools of all in the GPU's memory")
    float8 = config.kv_dtype == FLOAT8
    if float8 and keys.dtype == jnp.float16:
        raise ValueError(
            "kv_dtype=float8_e4m3fn for a float16 model: its pages are widened to bfloat16, and kernels want float16; "
            "use a bfloat16 or float32 model, or leave kv_dtype out"
        )
    gradient_pages = P if gradients else 0

    def pools_of(layers: int, make, *, staged: bool) -> LayerPools | None:
        if not layers:
            return None
        pool = lambda pages, dtype: make((layers, pages, M, config.page, H), dtype)
        kv = lambda: pool(P, config.kv_dtype or keys.dtype)
        scale = lambda: jnp.zeros((layers, P, M), jnp.float32) if float8 else None
        room = gradient_pages
        if staged and config.kv_grad_pages is not None:
            room = min(room, config.kv_grad_pages)
        gradient = lambda: pool(room, config.kv_grad_dtype or accumulator(keys.dtype))
        slots = all_free(layers, gradient_pages, room) if staged else None
        return LayerPools(k=kv(), v=kv(), dk=gradient(), dv=gradient(), slots=slots, k_scale=scale(), v_scale=scale())

    pools = Pools(
        hbm=pools_of(resident, jnp.zeros, staged=float8), host=pools_of(L - resident, _host_array, staged=True)
    )
    attention = top_k(ctx, config)
    if attention is None or not gradients:
        return pools
    rows = config.chunk // config.page
    heads = (M,) if attention.scope == "kv_head" else ()
    return pools._replace(
        selection=jnp.zeros((P // rows, L, rows, *heads, attention.pages), jnp.int32),
        mass=jnp.zeros((L, 2), accumulator(keys.dtype)),
    )


def check_pinned(needed: int) -> None:
    """Raises ValueError where JAX may not pin so many bytes of host memory: it reads the limit when it starts."""
    limit = float(os.environ.get(PINNED, PINNED_DEFAULT))
    if needed > limit * 2**30:
        raise ValueError(
            f"pools of {needed / 2**30:.1f} GiB in host memory, where JAX may pin {limit:g}; before it starts, set "
            f"{PINNED}={math.ceil(needed / 2**30) + 1}"
        )


def _take_region(size: int) -> None:
    """Makes JAX hold so many bytes of pinned host memory in one piece, for arrays to come. It takes regions of powers
    of two, and what is left of each is too small for the next pool: four, together of 66 GiB, found no room in 67."""
    region = _host_array((-(-size // 2**20), 2**20), jnp.uint8)
    region.block_until_ready()
    region.delete()


def _device() -> Any:
    return jax.config.jax_default_device or jax.devices()[0]


def _host_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array in pinned host memory, without passing through the GPU's. On a CPU there is one memory."""
    device = _device()
    if device.platform == "cpu":
        return jnp.zeros(shape, dtype)
    return jax.jit(lambda: lax.empty(shape, dtype), out_shardings=_host(device))()


def _host(device: Any) -> jax.sharding.Sharding:
    """Pinned host memory. With a SingleDeviceSharding jitted functions would take the arrays for the device's."""
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")


def pool_shapes(model: Any, ctx: int, config: Config) -> Pools:
    """Shapes of what `create_pools` makes, with the memory that each array lies in, to compile for."""
    pools = jax.eval_shape(lambda model: _pools(model, ctx, config, True), model)
    device = _device()
    if pools.host is None or device.platform == "cpu":
        return pools
    arrays = {name: getattr(pools.host, name) for name in PAGE_ARRAYS}
    on_host = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_host(device)) for name, x in arrays.items()}
    return pools._replace(host=pools.host._replace(**on_host))


def check_pools(pools: Pools, T: int, config: Config, *, gradients: bool = False) -> None:
    """Raises ValueError where the pools were not made for sequences of T tokens with these settings."""
    if pools.page != config.page:
        raise ValueError(f"the pools have pages of {pools.page} tokens, config.page={config.page}: make them with it")
    resident = 0 if pools.hbm is None else pools.hbm.k.shape[0]
    if resident != config.hbm_layers and not (config.hbm_layers is None and pools.host is None):
        raise ValueError(
            f"the pools of {resident} layers are in the GPU's memory, config.hbm_layers={config.hbm_layers}; "
            f"make them with create_pools(model, {T}, config)"
        )
    if (config.kv_dtype == FLOAT8) != (pools.any_layers.k_scale is not None):
        raise ValueError(
            f"the pools hold {pools.any_layers.k.dtype}, config.kv_dtype={config.kv_dtype}; "
            f"make them with create_pools(model, {T}, config)"
        )
    attention = top_k(T, config)
    if (
        gradients
        and attention is not None
        and (pools.selection is None or pools.selection.shape[-1] != attention.pages)
    ):
        raise ValueError(f"pools not made for {attention}: make them with create_pools(model, {T}, config)")
    for held in (pools.hbm, pools.host) if gradients else ():
        if held is not None and held.slots is not None:
            room, every = held.dk.shape[1], held.gradient_pages
            if room != min(every, config.kv_grad_pages or every):
                raise ValueError(
                    f"the pools have room for the gradients of {room} pages, config.kv_grad_pages="
                    f"{config.kv_grad_pages}; make them with create_pools(model, {T}, config)"
                )
    needed = chunk_count(T, config) * chunk_length(T, config) // config.page
    pages = min(pools.pages, pools.any_layers.gradient_pages) if gradients else pools.pages
    if needed > pages:
        kind = "gradient pools" if pages < pools.pages else "pools"
        raise ValueError(
            f"T={T}: {needed} pages of {config.page} tokens, the {kind} have {pages}; "
            f"make them with create_pools(model, {T}, config)"
        )


def clear_gradients(pools: Pools) -> Pools:
    """The pools with gradients 0."""

    def clear(layers: LayerPools | None) -> LayerPools | None:
        if layers is None:
            return None
        if layers.slots is None:
            # Of one zero XLA would fill one pool and copy it to the other.
            zero = lax.optimization_barrier((jnp.zeros((), layers.dk.dtype), jnp.zeros((), layers.dv.dtype)))
            dk, dv = (jnp.broadcast_to(x, pool.shape) for x, pool in zip(zero, (layers.dk, layers.dv), strict=True))
            return layers._replace(dk=dk, dv=dv)
        count, pages = layers.slots.of_page.shape
        return layers._replace(slots=all_free(count, pages, layers.dk.shape[1]))

    return pools._replace(hbm=clear(pools.hbm), host=clear(pools.host))
