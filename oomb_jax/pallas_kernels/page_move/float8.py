"""Keys and values in float8_e4m3fn, with a scale for each page and head."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from oomb_jax.shapes import iota


def quantise(
    values: Float[Array, "U M S H"], tokens: Int[Array, " U"]
) -> tuple[Float[Array, "U M S H"], Float32[Array, "U M"]]:
    """Pages in float8_e4m3fn and their scales: values ≈ pages * scales.

    The scale of a page and head is the smallest power of two for which its largest magnitude, divided by it, is at most
    448, the largest number of the format. So a normal number of the format keeps a relative error of 2^-4, and
    `fetch_pages` widens to bfloat16 exactly. Values are rounded to the nearest, ties to even.

    Args:
      values: float32 or narrower, of less than 2^127.
      tokens: int32, how many of the S tokens of each page count. The others neither set the scale nor are kept: they
        become 0.

    Returns:
      The pages, and float32 scales of 2^-117 and more; 1 for a page without a value other than 0. What is not finite
      becomes NaN.
    """
    exists = iota(values.shape[2])[None, :] < tokens[:, None]
    exact = jnp.where(exists[:, None, :, None], values.astype(jnp.float32), 0)
    # largest = fraction * 2^exponent with 1/2 <= fraction < 1, and 448 = 7/8 * 2^9.
    fraction, exponent = jnp.frexp(jnp.max(jnp.abs(exact), axis=(2, 3)))
    exponent = jnp.maximum(exponent - jnp.where(fraction <= 0.875, 9, 8), -117)  # its results are normal in bfloat16
    scales = jnp.where(fraction == 0, 1, _power_of_two(exponent))
    return (exact / scales[:, :, None, None]).astype(jnp.float8_e4m3fn), scales


def _power_of_two(exponent: Int[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
