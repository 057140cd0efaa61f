"""Stochastic rounding to bfloat16: small contributions survive in expectation where rounding to nearest loses them."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, PRNGKeyArray

_TAIL = 16  # bits of a float32 below those of a bfloat16


def stochastic_round(x: Float32[Array, "*shape"], dtype: DTypeLike, key: PRNGKeyArray) -> BFloat16[Array, "*shape"]:
    """Rounds `x` to one of its two neighbours in `dtype`, at random, so that the mean is `x`:

        P(up) = (|x| - down) / (up - down),    E[stochastic_round(x)] = x,    down <= |x| < up neighbours of |x|

    A bfloat16 is the upper half of a float32, and a float's bits grow with its magnitude. So the sum of the 32 bits of
    `x` and a uniform 16-bit integer, cut to its upper half, carries into the upper half with exactly this probability.

    - A value that `dtype` holds (both zeros and infinities included) stays as it is; NaN stays NaN.
    - A finite number never becomes infinite: beyond the largest finite bfloat16 it rounds toward zero.
    - The result depends on `x` and `key` alone. Give every array and every step its own key.

    Elementwise: compiled for a GPU it fuses with its neighbours, random bits included, and takes no memory of its own
    (on a CPU, XLA keeps the random bits in memory).

    Args:
        x: float32 of any shape.
        dtype: bfloat16, the only one so far.
        key: a single typed key.

    Raises:
        ValueError: if `dtype` is not bfloat16.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise ValueError(
            f"dtype={jnp.dtype(dtype)}: stochastic rounding goes to bfloat16 only; keep other dtypes in float32"
        )
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    tail = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = _upper_half(bits + tail)
    rounded = jnp.where(jnp.isinf(rounded), _upper_half(bits), rounded)
    # A NaN whose payload lies in the lower half would be cut to infinity, or carry into the sign.
    return jnp.where(jnp.isnan(x), x.astype(jnp.bfloat16), rounded)


def _upper_half(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type((bits >> jnp.uint32(_TAIL)).astype(jnp.uint16), jnp.bfloat16)
