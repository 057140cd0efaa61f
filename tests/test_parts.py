"""What the engine finds out about a model."""

import jax
import jax.numpy as jnp

from oomb_jax.models import create, parameter_names
from oomb_jax.parts import layer_at, reads


def test_each_half_of_a_layer_reads_its_own_weights():
    model = create("tiny", key=jax.random.key(0))
    layer = layer_at(model.layers, 0)
    h = jnp.zeros((8, model.config.hidden_size), layer.q_proj.weight[...].dtype)
    q, _, _ = layer.attention_inputs(h, jnp.arange(8))
    before = reads(lambda layer, h: layer.attention_inputs(h, jnp.arange(8)), layer, h)
    after = reads(lambda layer, h, o: layer.attention_output(h, o), layer, h, q)
    assert jax.tree.structure(before) == jax.tree.structure(layer)
    names = jax.tree.leaves(parameter_names(layer))
    named = lambda tree: {name for name, read in zip(names, jax.tree.leaves(tree), strict=True) if read}
    first = {"input_layernorm.weight", *(f"{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias"))}
    assert named(before) == first
    assert named(before) | named(after) == set(names)
    assert not named(before) & named(after)


def test_a_weight_of_both_halves_is_read_by_both():
    layer = {"both": jnp.ones(4), "none": jnp.ones(4), "inside": jnp.ones(4)}
    read = reads(lambda layer, x: jax.jit(jnp.multiply)(layer["inside"], x) + layer["both"], layer, jnp.ones(4))
    assert read == {"both": True, "none": False, "inside": True}
    assert reads(lambda layer, x: layer["both"], layer, jnp.ones(4)) == {"both": True, "none": False, "inside": False}
