"""The loss of the output layer and its gradients against automatic differentiation of all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.pallas_kernels.linear_cross_entropy import api, linear_cross_entropy, linear_cross_entropy_vjp
from oomb_jax.shapes import accumulator
from tests.tolerance import F64_GRADIENT, TIMES_PLAIN


def plain(x, weight, labels):
    logits = jnp.matmul(x, weight, preferred_element_type=accumulator(x.dtype))
    valid = labels != -100
    picked = logits[jnp.arange(len(x)), jnp.where(valid, labels, 0)]
    return jnp.where(valid, jax.nn.logsumexp(logits, axis=1) - picked, 0)


def problem(seed, dtype, R=42, D=16, V=37):
    rng = np.random.default_rng(seed)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((R, D), (D, V)))
    labels = rng.integers(V, size=R)
    labels[rng.random(R) < 0.2] = -100
    return x, weight, jnp.asarray(labels, jnp.int32), jnp.asarray(rng.normal(size=R))


def error(a, b):
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("rows", [1, 7, 42])
def test_losses_and_gradients_in_float64(monkeypatch, rows):
    with jax.enable_x64(True):
        x, weight, labels, d_losses = problem(rows, jnp.float64)
        monkeypatch.setattr(api, "TILE_LOGITS", rows * weight.shape[1])
        losses, vjp = jax.vjp(lambda x, weight: plain(x, weight, labels), x, weight)
        before = jnp.ones_like(weight)
        got, dx, d_weight = linear_cross_entropy_vjp(x, weight, labels, d_losses, before)
        assert error(linear_cross_entropy(x, weight, labels), losses) <= F64_GRADIENT
        for a, b in zip((got, dx, d_weight - 1), (losses, *vjp(d_losses)), strict=True):
            assert error(a, b) <= F64_GRADIENT


def test_bfloat16_gradients_are_as_good_as_plain_ones_and_the_weight_s_is_float32():
    x, weight, labels, d_losses = problem(0, jnp.bfloat16, R=128, D=64, V=200)
    d_losses = d_losses.astype(jnp.float32)
    gradients = lambda x, weight: jax.vjp(lambda x, weight: plain(x, weight, labels), x, weight)[1](d_losses)
    exact = gradients(x.astype(jnp.float32), weight.astype(jnp.float32))
    ordinary = gradients(x, weight)
    _, *got = linear_cross_entropy_vjp(x, weight, labels, d_losses, jnp.zeros(weight.shape, jnp.float32))
    assert got[1].dtype == jnp.float32
    for a, plain_bf16, b in zip(got, ordinary, exact, strict=True):
        assert error(a, b) <= TIMES_PLAIN * error(plain_bf16, b)


def test_a_label_that_no_column_has_gives_nan():
    x, weight, *_ = problem(0, jnp.float32)
    losses = linear_cross_entropy(x[:3], weight, jnp.array([36, 37, -1], jnp.int32))
    assert np.isnan(losses).tolist() == [False, True, True]
