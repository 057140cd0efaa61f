"""Layers whose pages are fetched, as those in host memory: the gradients of pages that are read where they lie."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax import placement
from oomb_jax.pallas_kernels.matmul import api as matmul_api
from tests.gradients import gradient_error, poison, random_batch, random_model

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")


@pytest.mark.parametrize(("scope", "segments", "layers", "rows"), [("all_heads", True, 3, 2), ("kv_head", False, 2, 3)])
def test_they_give_the_same_gradients(scope, segments, layers, rows, monkeypatch):
    rng = np.random.default_rng(rows)
    with jax.enable_x64():
        model = random_model(rng, layers=layers, kv_heads=2, dtype=jnp.float64)
        attention = oomb_jax.TopK(pages=2, scope=scope)
        config = oomb_jax.Config(attention=attention, page=8, chunk=8 * rows, remat="full")
        T = int(8 * rows * rng.uniform(6, 9))
        batch = random_batch(rng, (2, T), segments=segments)
        at_hand = []
        fetch = placement.fetch
        monkeypatch.setattr(placement, "fetch", lambda *a, **k: at_hand.append(k.get("at_hand")) or fetch(*a, **k))
        results = []
        for hbm_layers in None, 0, 1:
            config = dataclasses.replace(config, hbm_layers=hbm_layers)
            pools = poison(oomb_jax.create_pools(model, T + 20, config))
            result = step(model, pools, batch.tokens, batch.labels, config, batch.segments)
            results.append(jax.tree.map(np.asarray, result))
    # The second of two chunks has pages of the first at hand.
    assert any(x is not None for x in at_hand)
    (loss, grads, pools), *others = results
    used = -(-T // config.chunk)
    for other_loss, other_grads, other_pools in others:
        assert abs(other_loss - loss) < 1e-12
        assert gradient_error(other_grads, grads)[0] < 1e-12
        np.testing.assert_array_equal(other_pools.selection[:used], pools.selection[:used])


def test_a_float64_model_may_have_narrow_sums():
    rng = np.random.default_rng(0)
    with jax.enable_x64():
        model = random_model(rng, layers=3, kv_heads=2, dtype=jnp.float64)
        attention = oomb_jax.TopK(pages=2)
        config = oomb_jax.Config(attention=attention, page=8, chunk=16, kv_grad_dtype="bfloat16")
        tokens = random_batch(rng, (1, 100), segments=False).tokens
        found = []
        for hbm_layers in None, 0:
            config = dataclasses.replace(config, hbm_layers=hbm_layers)
            pools = oomb_jax.create_pools(model, 120, config)
            found.append(jax.tree.map(np.asarray, step(model, pools, tokens, tokens, config)[:2]))
    (loss, grads), (fetched_loss, fetched_grads) = found
    assert abs(fetched_loss - loss) < 1e-12
    # Sums of float64 and of float32, each rounded to bfloat16: seldom to different ones, which are 2**-8 apart.
    assert gradient_error(fetched_grads, grads)[0] < 2**-8


def test_pages_at_hand_are_found():
    ids, wanted = jnp.asarray([2, 5, 6, -1, -1], jnp.int32), jnp.asarray([0, 5, 6, 7, -1, -1], jnp.int32)
    nothing = jnp.zeros((1, 5, 1, 1, 1))
    at_hand = placement.Pages(nothing, nothing, jnp.int32(0), jnp.zeros((1, 1), jnp.int32), ids)
    assert placement._among(at_hand, wanted, 8).tolist() == [-1, 1, 2, -1, -1, -1]


@pytest.mark.parametrize(("remat", "recompute"), [("full", {4}), ("dots", {12})])
def test_products_leave_room_for_the_movers_that_are_at_work(monkeypatch, remat, recompute):
    def product(a, b, setting, **transposed):
        with jax.named_scope(f"spares_{setting.spare}"):
            return matmul_api.reference(a, b, **transposed)

    # As on a Hopper GPU, but for the kernel itself.
    monkeypatch.setattr(matmul_api, "_product", product)
    for module in matmul_api, placement:
        monkeypatch.setattr(module, "no_hopper", lambda: None)
    for name in "_too_small", "unsupported":
        monkeypatch.setattr(matmul_api, name, lambda *_: None)
    model = oomb_jax.models.create("tiny", key=jax.random.key(0))
    attention = oomb_jax.TopK(pages=1)
    config = oomb_jax.Config(
        page=8, chunk=16, attention=attention, hbm_layers=0, remat=remat, implementation="reference"
    )
    tokens = jnp.zeros(80, jnp.int32)
    step = jax.jit(functools.partial(oomb_jax.value_and_grad, config=config))
    text = step.lower(model, oomb_jax.create_pools(model, 80, config), tokens, tokens).compile().as_text()
    assert text is not None
    spared = {}
    for scope, spare in re.findall(r'op_name="[^"]*/(fill|recompute|backward)/[^"]*spares_(\d+)', text):
        spared.setdefault(scope, set()).add(int(spare))
    assert spared == {"fill": {4}, "recompute": recompute, "backward": {12}}
