"""What the engine finds out about a model, and the gradients that hang on it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax.models import create, parameter_names
from oomb_jax.parts import layer_at, reads
from tests.gradients import gradient_error, random_batch
from tests.tolerance import F64_GRADIENT


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """Heads of eight; `both` is a weight of both halves, `none` of neither."""

    both: Any
    own: Any
    none: Any

    def attention_inputs(self, h, positions):
        x = jnp.sin(h + 0.1 * positions[:, None].astype(h.dtype)) @ self.both
        q = x.reshape(len(h), 2, 8)
        return q, jnp.cos(q[:, :1]), q[:, 1:]

    def attention_output(self, h, o):
        return h + jnp.tanh(o.reshape(len(h), -1) @ self.both) @ self.own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    table: Any
    layers: Layer

    def embed(self, tokens):
        return self.table[tokens]

    def head(self, h):
        return h, self.table.T


@pytest.mark.parametrize(("layers", "hbm_layers"), [(6, 0), (6, 1), (5, 0), (4, None)])
def test_a_weight_of_both_halves_gets_both_gradients(layers, hbm_layers):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4)
        model = Model(draw(31, 16), Layer(draw(layers, 16, 16), draw(layers, 16, 16), draw(layers, 3)))
        batch = random_batch(rng, (45,), segments=False)
        config = oomb_jax.Config(page=8, chunk=16, hbm_layers=hbm_layers)
        arguments = batch.tokens % 31, batch.labels % 31
        pools = oomb_jax.create_pools(model, 45, config)
        loss, grads, _ = jax.jit(oomb_jax.value_and_grad, static_argnames="config")(model, pools, *arguments, config)
        full = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")
        expected_loss, expected, _ = full(model, None, *arguments, config)
    assert abs(float(loss - expected_loss)) <= F64_GRADIENT * float(expected_loss)
    assert not np.any(grads.layers.none)
    none = dataclasses.replace(grads.layers, none=jnp.ones(1)), dataclasses.replace(expected.layers, none=jnp.ones(1))
    ours, full = (dataclasses.replace(g, layers=x) for g, x in zip((grads, expected), none, strict=True))
    assert gradient_error(ours, full)[0] <= F64_GRADIENT
