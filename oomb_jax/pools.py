"""The key/value pools and their gradient pools: made once, passed through every step, updated in place by donation."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.config import Config
from oomb_jax.parts import key_shape, layer_count
from oomb_jax.selection import representatives
from oomb_jax.sequence import chunk_count, chunk_length, top_k
from oomb_jax.shapes import Pool, accumulator


class Pools(NamedTuple):
    """Keys, values and their gradients of every layer and page. The content before a step does not matter: a step
    overwrites or clears whatever it reads."""

    k: Pool
    v: Pool
    dk: Pool
    dv: Pool
    representatives: Float[Array, "L P M H"] | None = None
    """What Top-K attention scores pages by."""
    selection: Int[Array, "n L R *M K"] | None = None
    """The pages that each chunk, layer and query page chose."""
    mass: Float[Array, "L 2"] | None = None
    """Of some queries of the last chunk, the probability that dense attention would give to the chosen pages, and to
    all earlier ones."""

    @property
    def pages(self) -> int:
        """P, pages of a layer."""
        return self.k.shape[1]

    @property
    def page(self) -> int:
        """S, tokens in a page."""
        return self.k.shape[3]


def create_pools(model: Any, ctx: int, config: Config, *, gradients: bool = True) -> Pools:
    """Pools for sequences of up to `ctx` tokens.

    Args:
      model: a model as `oomb_jax.models` makes it, or its `jax.eval_shape`: only shapes are read.
      ctx: tokens of the longest sequence, rounded up to whole chunks.
      config: `page`, `chunk`, `kv_dtype` and `kv_grad_dtype` matter.
      gradients: False leaves out what only a reverse pass needs: the gradient pools have no pages, and no selection is
        kept. For `token_losses`.

    Returns:
      Pools of 2·L·P·M·S·H elements of `kv_dtype`, and as many of `kv_grad_dtype`. For Top-K attention, L·P·M·H elements
      of the model's dtype and P/S·L·K int32 more.

    Raises:
      ValueError: ctx is below 1.
    """
    if ctx < 1:
        raise ValueError(f"ctx={ctx}: a sequence has at least one token")
    keys = key_shape(model)
    _, M, H = keys.shape
    P = chunk_count(ctx, config) * chunk_length(ctx, config) // config.page
    pool = lambda pages, dtype: jnp.zeros((layer_count(model.layers), pages, M, config.page, H), dtype)
    kv = functools.partial(pool, P, config.kv_dtype or keys.dtype)
    gradient = functools.partial(pool, P if gradients else 0, config.kv_grad_dtype or accumulator(keys.dtype))
    pools = Pools(k=kv(), v=kv(), dk=gradient(), dv=gradient())
    attention = top_k(ctx, config)
    if attention is None:
        return pools
    L, rows = layer_count(model.layers), config.chunk // config.page
    heads = (M,) if attention.scope == "kv_head" else ()
    pools = pools._replace(representatives=jnp.zeros((L, P, M, H), keys.dtype))
    if not gradients:
        return pools
    return pools._replace(
        selection=jnp.zeros((P // rows, L, rows, *heads, attention.pages), jnp.int32),
        mass=jnp.zeros((L, 2), accumulator(keys.dtype)),
    )


def check_pools(pools: Pools, T: int, config: Config, *, gradients: bool = False) -> None:
    """Raises ValueError where the pools were not made for sequences of T tokens with these settings."""
    if pools.page != config.page:
        raise ValueError(f"the pools have pages of {pools.page} tokens, config.page={config.page}: make them with it")
    attention = top_k(T, config)
    if attention is not None:
        selection = pools.selection if gradients else pools.representatives
        if selection is None or (gradients and selection.shape[-1] != attention.pages):
            raise ValueError(
                f"the pools were not made for {attention}; make them with create_pools(model, {T}, config)"
            )
    needed = chunk_count(T, config) * chunk_length(T, config) // config.page
    pages = min(pools.pages, pools.dk.shape[1]) if gradients else pools.pages
    if needed > pages:
        kind = "gradient pools" if pages < pools.pages else "pools"
        raise ValueError(
            f"T={T}: {needed} pages of {config.page} tokens, the {kind} have {pages}; "
            f"make them with create_pools(model, {T}, config)"
        )


def append(pools: Pools, first: Int[Array, ""], k: Float[Array, "L C M H"], v: Float[Array, "L C M H"]) -> Pools:
    """Writes the keys and values of whole pages, of every layer, from page `first` on, and what represents them."""

    def put(pool, own):
        L, C, M, H = own.shape
        pages = own.reshape(L, C // pools.page, pools.page, M, H).swapaxes(2, 3)
        return lax.dynamic_update_slice_in_dim(pool, pages.astype(pool.dtype), first, axis=1)

    pools = pools._replace(k=put(pools.k, k), v=put(pools.v, v))
    if pools.representatives is None:
        return pools
    means = jax.vmap(lambda k: representatives(k, pools.page))(k).astype(pools.representatives.dtype)
    return pools._replace(representatives=lax.dynamic_update_slice_in_dim(pools.representatives, means, first, axis=1))


def own_gradients(
    pools: Pools, layer: Int[Array, ""], first: Int[Array, ""], pages: int
) -> tuple[Float[Array, "C M H"], Float[Array, "C M H"]]:
    """What later chunks have added to the gradients of `pages` pages of a layer from page `first` on."""

    def read(pool):
        _, _, M, S, H = pool.shape
        zero = jnp.int32(0)
        own = lax.dynamic_slice(pool, (layer, first, zero, zero, zero), (1, pages, M, S, H))
        return own[0].swapaxes(1, 2).reshape(pages * S, M, H)

    return read(pools.dk), read(pools.dv)


def clear_gradients(pools: Pools) -> Pools:
    """The pools with gradients 0."""
    return pools._replace(dk=jnp.zeros_like(pools.dk), dv=jnp.zeros_like(pools.dv))
