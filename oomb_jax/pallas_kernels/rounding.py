"""Stochastic rounding to bfloat16 inside kernels: the contract of `oomb_jax.rounding`, with bits of its own.

The random bits are a hash of where an element lies and of a word drawn from the key. They depend on neither the order
of programs nor the number of rows, and need no state; every kernel that writes a gradient pool draws the same ones.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PRNGKeyArray, UInt32

LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def words(key: PRNGKeyArray) -> UInt32[Array, "2"]:
    """A word for each of the two gradient pools: of keys, of values."""
    return jax.random.bits(key, (2,), jnp.uint32)


def mix(x):
    """A bijection of uint32 in which every bit of the result depends on every bit of x: MurmurHash3's last step."""
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35):
        x = (x ^ lax.shift_right_logical(x, jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ lax.shift_right_logical(x, jnp.uint32(16))


def random_bits(word, tile, element):
    """32 bits for every element of a tile.

    Args:
      word: uint32, of `words`.
      tile: int32, page * M + head. A layer needs a key of its own, so that it does not matter which pool it is in.
      element: int32, which of the S * H of that head's part of the page.
    """
    of_tile = mix(word ^ mix(tile.astype(jnp.uint32)))
    return mix(mix(element.astype(jnp.uint32)) ^ of_tile)


def stochastic_round(x, bits):
    """float32 `x` at one of its two neighbours in bfloat16, still in float32. See `oomb_jax.rounding`."""
    tail = lax.shift_right_logical(bits, jnp.uint32(16))
    upper = (lax.bitcast_convert_type(x, jnp.uint32) + tail) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(upper, jnp.float32)
    # Beyond the largest the carry would give infinity. Infinities stay, NaN becomes one that bfloat16 can hold.
    rounded = jnp.minimum(jnp.maximum(rounded, -LARGEST), LARGEST)
    return jnp.where(jnp.abs(x) < jnp.inf, rounded, x)
