"""Chunk-recurrent gradients of Top-K attention against masked full attention under the same selection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax.selection import statistics
from oomb_jax.sequence import top_k
from tests.gradients import gradient_error, most_held, poison, random_batch, random_model
from tests.tolerance import F64_GRADIENT

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
yardstick = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")
losses = jax.jit(oomb_jax.token_losses, static_argnames="config", donate_argnames="pools")


@dataclasses.dataclass(frozen=True)
class Problem:
    model: object
    tokens: jax.Array
    labels: jax.Array
    segments: jax.Array | None
    config: oomb_jax.Config


def random_problem(seed):
    """Odd lengths, K of 1 to 5 pages, both scopes, forced pages, segments in every other one."""
    rng = np.random.default_rng(seed)
    group, kv_heads = [(1, 2), (3, 1), (2, 3)][seed % 3]
    model = random_model(rng, layers=1 + seed % 3, group=group, kv_heads=kv_heads, tied=seed % 4 < 2)
    batch = random_batch(rng, (int(rng.integers(150, 260)),), segments=seed % 2 == 1)
    K = [1, 3, 5][seed % 3]
    attention = oomb_jax.TopK(
        pages=K,
        scope="kv_head" if seed % 4 >= 2 else "all_heads",
        first_pages=int(rng.integers(2)) if K > 1 else 0,
        local_pages=int(rng.integers(2)) if K > 1 else 0,
        scaled=bool(rng.integers(2)),
    )
    config = oomb_jax.Config(
        page=8,
        chunk=8 * int(rng.integers(1, 5)),
        attention=attention,
        remat=("none", "dots", "full")[seed % 3],
        hbm_layers=[None, 0, 1][int(rng.integers(3))],
    )
    return Problem(model, batch.tokens, batch.labels, batch.segments, config)


def by_layer(selection):
    """[n, L, R, ...] -> [L, n R, ...], as full attention takes it."""
    return jnp.moveaxis(selection, 1, 0).reshape(selection.shape[1], -1, *selection.shape[3:])


@pytest.mark.parametrize("seed", range(8))
def test_gradients_equal_masked_full_attention(seed):
    with jax.enable_x64(True):
        x = random_problem(seed)
        T = len(x.tokens)
        assert top_k(T, x.config) is not None
        arguments = x.tokens, x.labels, x.config, x.segments
        loss, grads, pools = step(x.model, poison(oomb_jax.create_pools(x.model, T + 40, x.config)), *arguments)
        R = x.config.chunk // x.config.page
        selection = by_layer(pools.selection[: -(-T // x.config.chunk)])
        chosen = selection >= 0
        assert chosen[:, R:].any()
        expected_loss, expected, _ = yardstick(x.model, None, *arguments, selection=selection)
        _, dense, _ = yardstick(x.model, None, *arguments)
        assert abs(float(loss - expected_loss)) <= F64_GRADIENT * float(expected_loss)
        error, name = gradient_error(grads, expected)
        assert error <= F64_GRADIENT, name
        if x.segments is None:  # documents may be so short that all of their pages are chosen
            assert gradient_error(grads, dense)[0] > 1e-3
        told = statistics(pools.selection[: -(-T // x.config.chunk)], pools.mass, x.config.page)
        assert 0 < told["recall"] <= 1
        assert 0 < told["attention_share"] <= 1
        tables = np.asarray(pools.selection[: -(-T // x.config.chunk)])
        assert told["gradient_pages"] == max(most_held(tables))
        by_token, _ = losses(x.model, poison(oomb_jax.create_pools(x.model, T, x.config, gradients=False)), *arguments)
        mean = by_token.sum() / int((x.labels != -100).sum())
        np.testing.assert_allclose(mean, expected_loss, rtol=F64_GRADIENT)


def test_a_budget_of_all_pages_is_dense_attention_bit_for_bit():
    rng = np.random.default_rng(0)
    model = random_model(rng, dtype=jnp.float32)
    batch = random_batch(rng, (100,), segments=False)
    results = []
    # 16 pages, 12 of them before the last chunk.
    for attention in oomb_jax.Dense(), oomb_jax.TopK(pages=12), oomb_jax.TopK(pages=64):
        config = oomb_jax.Config(page=8, chunk=32, attention=attention)
        pools = oomb_jax.create_pools(model, 100, config)
        results.append(step(model, pools, batch.tokens, batch.labels, config)[:2])
    for other in results[1:]:
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), results[0], other)))


def test_pools_of_other_settings_are_refused():
    model = random_model(np.random.default_rng(0), dtype=jnp.float32)
    tokens = jnp.zeros(100, jnp.int32)
    sparse = oomb_jax.Config(page=8, chunk=16, attention=oomb_jax.TopK(pages=2))
    for other in oomb_jax.Dense(), oomb_jax.TopK(pages=3):
        pools = oomb_jax.create_pools(model, 100, dataclasses.replace(sparse, attention=other))
        with pytest.raises(ValueError, match=r"pools not made for TopK\(pages=2"):
            oomb_jax.value_and_grad(model, pools, tokens, tokens, sparse)
    bare = oomb_jax.create_pools(model, 100, sparse, gradients=False)
    with pytest.raises(ValueError, match="pools"):
        oomb_jax.value_and_grad(model, bare, tokens, tokens, sparse)
