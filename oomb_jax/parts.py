"""A model as the engine sees it: a stack of layers, and the outer part, which embeds tokens and makes logits.

`model.layers` is one pytree whose leaves have a leading axis L. The outer part is the model with those leaves left out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from oomb_jax.config import Config
from oomb_jax.shapes import accumulator, iota


@jax.tree_util.register_static
class _Hole:
    """Stands in the outer part where a layer's leaf was."""

    def __eq__(self, other):
        return isinstance(other, _Hole)

    def __hash__(self):
        return hash(_Hole)


def split(model: Any) -> tuple[Any, Any]:
    """(outer part, layers). Works on a model and on any pytree of the same structure, such as its gradients.

    Raises:
      ValueError: JAX does not know the layers' leaves by the name `layers`.
    """
    in_layers = lambda path: getattr(path[0], "name", getattr(path[0], "key", None)) == "layers"
    outer = jax.tree_util.tree_map_with_path(lambda path, x: _Hole() if in_layers(path) else x, model)
    # A hole is a node without leaves. Layers that stay in the outer part would get no gradient.
    if len(jax.tree.leaves(outer)) + len(jax.tree.leaves(model.layers)) != len(jax.tree.leaves(model)):
        raise ValueError(
            f"{type(model).__name__}: its pytree has no field named `layers`; register it with names, as by "
            "jax.tree_util.register_dataclass or register_pytree_with_keys"
        )
    return outer, model.layers


def join(outer: Any, layers: Any) -> Any:
    """The inverse of `split`."""
    leaves = iter(jax.tree.leaves(layers))
    is_hole = lambda x: isinstance(x, _Hole)
    return jax.tree.map(lambda x: next(leaves) if is_hole(x) else x, outer, is_leaf=is_hole)


def layer_count(layers: Any) -> int:
    """L."""
    return jax.tree.leaves(layers)[0].shape[0]


def layer_at(layers: Any, l: Int[Array, ""] | int) -> Any:
    """Layer l of the stack."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, l, 0, keepdims=False), layers)


def reads(part: Callable[..., Any], layer: Any, *arrays: Any) -> Any:
    """Which leaves of a layer `part(layer, *arrays)` reads, found by tracing: a pytree of bools."""
    leaves, structure = jax.tree.flatten(layer)
    traced = jax.make_jaxpr(lambda leaves, *arrays: part(jax.tree.unflatten(structure, leaves), *arrays))
    jaxpr = traced(leaves, *arrays).jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
    return jax.tree.unflatten(structure, [id(x) in read for x in jaxpr.invars[: len(leaves)]])


def key_shape(model: Any) -> jax.ShapeDtypeStruct:
    """Shape [tokens, M, H] and dtype of a layer's keys, found without computing anything."""

    def keys(model):
        h = model.embed(jnp.zeros(8, jnp.int32))
        return layer_at(model.layers, 0).attention_inputs(h, iota(8))[1]

    return jax.eval_shape(keys, model)


def zero_gradients(model: Any, config: Config) -> Any:
    """Zeros of `config.grad_dtype`, a pytree like the model."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, config.grad_dtype or accumulator(x.dtype)), model)


def add(total: Any, more: Any) -> Any:
    """total + more, in total's dtypes."""
    return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)
