"""The gradient of the embedding, against automatic differentiation."""

import dataclasses
from collections.abc import Callable
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
    """A model without layers and head."""

    table: Any
    other: Any
    how: Callable[..., Any] = dataclasses.field(metadata={"static": True})

    def embed(self, tokens):
        return self.how(self, tokens)


def two_tables(outer, tokens):
    """Half of the tokens have a row in each, by an index that is negative for the others."""
    get = lambda table, i: table.at[i].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return get(outer.table, tokens) + get(outer.other, tokens - V // 2)


HOW = {
    "lookup": lambda outer, tokens: outer.table[tokens],
    "scaled": lambda outer, tokens: 3 * jnp.take(outer.table, tokens, axis=0, mode="clip"),
    "shared by tokens": lambda outer, tokens: outer.table[tokens % 5] + outer.other[:1],
    "two tables": two_tables,
    "product": lambda outer, tokens: outer.table[tokens] @ outer.other[:D],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("tokens", [1, 77, 2 * EMBED_ROWS])
def test_equals_autodiff_and_is_added(how, tokens):
    rng = np.random.default_rng(tokens)
    with jax.enable_x64(True):
        draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
        outer, grads = (Outer(draw(V, D), draw(V, D), HOW[how]) for _ in range(2))
        dh, ids = draw(tokens, D), jnp.asarray(rng.integers(0, V, tokens))
        more = jax.grad(lambda outer: jnp.sum(outer.embed(ids) * dh))(outer)
        ours = jax.jit(embed_gradient)(outer, grads, ids, dh)
        for before, added, after in zip(*map(jax.tree.leaves, (grads, more, ours)), strict=True):
            atol = F64_GRADIENT * np.abs(added).max(initial=1)
            np.testing.assert_allclose(after, before + added, rtol=0, atol=atol)


@pytest.mark.parametrize("how", ["lookup", "shared by tokens"])
def test_a_row_that_comes_often_is_summed_in_float32(how):
    """1 + 300 times 2**-9, where bfloat16 would stay at 1, or at the sum of a few."""
    zeros = jnp.zeros((V, D), jnp.bfloat16)
    outer, grads = (Outer(zeros, zeros, HOW[how]) for _ in range(2))
    dh = jnp.full((301, D), 2**-9, jnp.bfloat16).at[0].set(1)
    ids = jnp.full(301, 7) if how == "lookup" else jnp.arange(301) % 8 * 5
    table = np.asarray(jax.jit(embed_gradient)(outer, grads, ids, dh).table)
    assert table.dtype == jnp.bfloat16
    row = 7 if how == "lookup" else 0
    np.testing.assert_array_equal(table[row], np.full(D, 1 + 300 * 2**-9, table.dtype))
    assert not np.any(np.delete(table.astype(np.float32), row, axis=0))
