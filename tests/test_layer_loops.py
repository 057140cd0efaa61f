"""Loops over layers in pairs do what loops over single layers do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.layer_loops import go_down, go_up


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_pairs_give_what_single_layers_give(n, with_inputs):
    inputs = jnp.arange(1.0, n + 1) if with_inputs else None

    def up(l, carry, x):
        carry = 3 * carry + jnp.float32(l) + (1 if x is None else x)
        return carry, jnp.sin(carry)

    def first(l, carry, kept):
        return 2 * carry, jnp.float32(l) + kept

    def second(l, halfway, kept, x):
        carry, more = halfway
        return carry + more * kept * (jnp.float32(l) if x is None else x)

    down = lambda l, carry, kept, x: second(l, first(l, carry, kept), kept, x)

    @jax.jit(static_argnames="pairs")
    def both(pairs):
        top, kept = go_up(up, jnp.int32(5), jnp.float32(0), inputs, n, pairs=pairs)
        return top, go_down(first, second, jnp.int32(4 + n), jnp.float32(0), kept, inputs, n, pairs=pairs)

    top, bottom, kept = 0.0, 0.0, []
    for i in range(n):
        top, x = up(5 + i, top, i + 1 if with_inputs else None)
        kept.append(x)
    for i in reversed(range(n)):
        bottom = down(5 + i, bottom, kept[i], i + 1 if with_inputs else None)
    for pairs in (True, False):
        np.testing.assert_allclose(both(pairs), (top, bottom), rtol=1e-5)
