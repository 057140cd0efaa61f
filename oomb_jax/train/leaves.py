"""The leaves of a state by name, as a checkpoint keeps them: plain arrays, each with a checksum."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32

from oomb_jax.train.optimizer import parameter_names


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a state under dotted names. Raises TypeError where one is no JAX array."""
    named = dict(zip(parameter_names(tree), jax.tree.leaves(tree), strict=True))
    for name, leaf in named.items():
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(f"{name} is a {type(leaf).__name__}: a state is made of JAX arrays; use jnp.asarray")
    return named


def _is_key(x: Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def without_keys(named: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves with typed keys of random numbers as their integers."""

    def data(x: Any) -> Any:
        if not _is_key(x):
            return x
        return jax.random.key_data(x) if isinstance(x, jax.Array) else jax.eval_shape(jax.random.key_data, x)

    return {name: data(x) for name, x in named.items()}


def like(x: Array, wanted: Array | jax.ShapeDtypeStruct) -> Array:
    """A restored leaf, as a typed key where a key is wanted."""
    if not _is_key(wanted):
        return x
    # The implementation of a key can only be asked of a key.
    spec = []
    jax.eval_shape(lambda key: spec.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), wanted.dtype))
    return jax.random.wrap_key_data(x, impl=spec[0])


def with_sharding(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of a leaf, with where it goes: where nothing says so, to the default device."""
    sharding = x.sharding if x.sharding is not None else jnp.zeros(()).sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@jax.jit
def checksums(arrays: dict[str, Array]) -> dict[str, UInt32[Array, ""]]:
    """A sum of the bits of every array, sum_i (2 i + 1) b_i mod 2**32, b_i the bits of element i as an integer.

    The weights are odd, so any change of one element changes the sum; they differ, so exchanged elements do too."""
    return {name: _checksum(x) for name, x in arrays.items()}


def _checksum(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    # Integers of 64 bits become two of 32 along a new last axis.
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
    weight = jnp.ones(bits.shape, jnp.uint32)
    stride = 2
    for axis in reversed(range(bits.ndim)):
        weight += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.sum(bits * weight, dtype=jnp.uint32)


def differing_leaves(wanted: Mapping[str, Any], saved: Mapping[str, list]) -> list[str]:
    """What a saved state, dtype and shape of each leaf, has otherwise than the wanted one, in words."""
    found = []
    if missing := [name for name in wanted if name not in saved]:
        found.append(f"it lacks {some(missing)}")
    if surplus := [name for name in saved if name not in wanted]:
        found.append(f"it has {some(surplus)} too many")
    both = {n: (str(x.dtype), list(x.shape), *saved[n][:2]) for n, x in wanted.items() if n in saved}
    if other := [f"{n} ({s[2]}{s[3]} there, {s[0]}{s[1]} here)" for n, s in both.items() if s[:2] != s[2:]]:
        found.append(f"it differs in {some(other)}")
    return found


def some(names: list[str], most: int = 6) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
