"""Chunk-recurrent gradients against full attention and automatic differentiation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from tests.gradients import gradient_error, random_batch, random_model
from tests.tolerance import F64_GRADIENT

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
yardstick = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")


def poison(pools):
    """Pools that hold NaN everywhere: whatever a step reads it must have written."""
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pools)


def random_case(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    page = pick(8, 16)
    config = oomb_jax.Config(page=page, chunk=page * int(rng.integers(1, 5)), remat=pick("none", "dots", "full"))
    T = pick(1, 2, config.chunk, 3 * config.chunk, *(int(x) for x in rng.integers(1, 300, 6)))
    shape = pick((T,), (1, T), (3, T))
    model = functools.partial(
        random_model,
        layers=pick(1, 2, 3),
        group=pick(1, 3, 7),
        kv_heads=pick(1, 2),
        tied=pick(True, False),
    )
    return rng, config, shape, model


@pytest.mark.parametrize("seed", range(36))
def test_gradients_equal_full_attention_in_float64(seed):
    rng, config, shape, model = random_case(seed)
    with jax.enable_x64(True):
        model = model(rng)
        batch = random_batch(rng, shape, segments=seed % 3 == 0)
        pools = poison(oomb_jax.create_pools(model, shape[-1] + int(rng.integers(100)), config))
        loss, grads, _ = step(model, pools, batch.tokens, batch.labels, config, batch.segments)
        expected_loss, expected, _ = yardstick(model, None, batch.tokens, batch.labels, config, batch.segments)
        assert loss.dtype == jnp.float64
        assert abs(float(loss - expected_loss)) <= F64_GRADIENT * max(1.0, abs(float(expected_loss)))
        error, name = gradient_error(grads, expected)
        assert error <= F64_GRADIENT, name
