"""The gradient of the embedding, against automatic differentiation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.loss import EMBED_ROWS, embed_gradient
from tests.tolerance import F64_GRADIENT

V, D = 40, 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer:
    """A lookup that is no plain one: scaled, with another leaf that all tokens share."""

    table: Any
    shift: Any

    def embed(self, tokens):
        return 3 * jnp.take(self.table, tokens, axis=0, mode="clip") + self.shift[None]


@dataclasses.dataclass(frozen=True)
class Plain(Outer):
    def embed(self, tokens):
        return self.table[tokens]


jax.tree_util.register_dataclass(Plain)


@pytest.mark.parametrize("kind", [Outer, Plain])
@pytest.mark.parametrize("tokens", [1, 77, 2 * EMBED_ROWS])
def test_equals_autodiff_and_is_added(kind, tokens):
    rng = np.random.default_rng(tokens)
    with jax.enable_x64(True):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
        outer, grads, dh = kind(draw(V, D), draw(D)), kind(draw(V, D), draw(D)), draw(tokens, D)
        ids = jnp.asarray(rng.integers(0, V, tokens))
        more = jax.grad(lambda outer: jnp.sum(outer.embed(ids) * dh))(outer)
        ours = jax.jit(embed_gradient)(outer, grads, ids, dh)
        for before, added, after in zip(*map(jax.tree.leaves, (grads, more, ours)), strict=True):
            np.testing.assert_allclose(after, before + added, atol=F64_GRADIENT * np.abs(added).max(initial=1))


def test_a_token_that_comes_often_is_summed_in_float32():
    """1 + 300 times 2**-9, where bfloat16 would stay at 1, or at the sum of a few."""
    outer, grads = (Plain(jnp.zeros((V, D), jnp.bfloat16), jnp.zeros(D, jnp.bfloat16)) for _ in range(2))
    dh = jnp.full((301, D), 2**-9, jnp.bfloat16).at[0].set(1)
    ours = jax.jit(embed_gradient)(outer, grads, jnp.full(301, 7), dh)
    assert ours.table.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.table[7], jnp.bfloat16(1 + 300 * 2**-9))
    assert not np.any(np.delete(np.asarray(ours.table, np.float32), 7, axis=0))


def test_no_second_table_is_made():
    rows, table = 16, 2**20
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    outer, dh, ids = Plain(shape(table, D), shape(D)), shape(rows, D), jax.ShapeDtypeStruct((rows,), jnp.int32)
    memory: Any = jax.jit(embed_gradient, donate_argnums=1).lower(outer, outer, ids, dh).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * table
