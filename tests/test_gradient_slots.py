"""Gradient pools with room for fewer than all pages: the same gradients, and NaN where the room does not suffice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax.gradient_slots import all_free, most_at_once, turn_over
from oomb_jax.pools import check_pools
from tests.gradients import gradient_error, most_held, poison, random_batch, random_model

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")


@pytest.mark.parametrize("seed", range(3))
def test_the_most_at_once_is_counted(seed):
    rng = np.random.default_rng(seed)
    n, L, rows, K = (int(rng.integers(1, most)) for most in (9, 4, 4, 5))
    selection = np.full((n, L, rows, K), -1)
    for c in range(1, n):
        selection[c] = rng.integers(-1, c * rows, selection[c].shape)
    assert list(most_at_once(jnp.asarray(selection, jnp.int32))) == most_held(selection)


@pytest.mark.parametrize("seed", range(3))
def test_no_two_pages_have_one_slot(seed):
    rng = np.random.default_rng(seed)
    n, rows = 12, 3
    chosen = [rng.permutation(c * rows)[: rng.integers(0, c * rows + 1)] for c in range(n)]
    wanted = np.full((n, 1, 1, n * rows), -1)
    for c, pages in enumerate(chosen):
        wanted[c, 0, 0, : len(pages)] = pages
    table = np.full((n, 1, rows, n * rows), -1)
    table[:, :, :1] = wanted
    room = most_held(table)[0]
    slots, had = all_free(2, n * rows, room), {}
    for c in reversed(range(n)):
        own = [had.pop(page, -1) for page in range(c * rows, (c + 1) * rows)]
        pages = rng.permutation(np.concatenate([chosen[c], [-1, -1]]))
        wanted = np.stack([np.full(len(pages), -1), pages])  # the other layer adds to nothing
        turnover, slots = turn_over(slots, jnp.int32(c * rows), rows, jnp.asarray(wanted, jnp.int32))
        assert turnover.own[1].tolist() == own
        assert (turnover.taken[0] == -1).all()
        for page, slot, new in zip(pages.tolist(), *(x[1].tolist() for x in turnover[1:]), strict=True):
            if page < 0:
                assert slot == -1
                continue
            assert new == (page not in had)
            assert had.setdefault(page, slot) == slot
        assert len(set(had.values())) == len(had)
        assert all(0 <= slot < room for slot in had.values())
    np.testing.assert_array_equal(slots.of_page[0], -1)


@pytest.mark.parametrize("seed", range(3))
def test_few_slots_give_the_same_gradients_and_too_few_nan(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]
    model = random_model(rng, dtype=jnp.float32)
    # The first with stochastic rounding, which is that of many chunks.
    page, rows, chunks = (8, 1, 70) if seed == 0 else (pick(8, 16), pick(1, 2, 3), rng.uniform(6, 12))
    config = oomb_jax.Config(
        attention=oomb_jax.TopK(pages=pick(2, 3), scope=pick("all_heads", "kv_head")),
        page=page,
        chunk=page * rows,
        remat="full",
        kv_dtype=pick(None, "float8_e4m3fn"),
        kv_grad_dtype=pick(None, "bfloat16") if seed else "bfloat16",
        hbm_layers=pick(0, 1) if seed else 0,
    )
    T = int(page * rows * chunks)
    batch = random_batch(rng, (2, T), segments=seed == 1)
    arguments = batch.tokens, batch.labels
    longer = T + 3 * config.chunk
    pools = poison(oomb_jax.create_pools(model, longer, config))
    loss, grads, pools_after = step(model, pools, *arguments, config, batch.segments)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    if config.kv_dtype is None:  # beside pools that are added to where they lie
        plain = dataclasses.replace(config, hbm_layers=None)
        pools = poison(oomb_jax.create_pools(model, longer, plain))
        expected = step(model, pools, *arguments, plain, batch.segments)[1]
        assert gradient_error(grads, expected)[0] < (0.02 if config.kv_grad_dtype == "bfloat16" else 1e-4)
    used = -(-T // config.chunk)
    # Of both sequences the pools hold the choice of the second.
    pools = poison(oomb_jax.create_pools(model, longer, config))
    segments = None if batch.segments is None else batch.segments[:1]
    first = step(model, pools, *(x[:1] for x in arguments), config, segments)
    staged = slice(config.hbm_layers if config.kv_dtype is None else 0, None)
    room = max(max(most_held(np.asarray(x.selection)[:used, staged])) for x in (pools_after, first[2]))
    assert 1 < room < used * rows
    for missing in (0, 1):
        few = dataclasses.replace(config, kv_grad_pages=room - missing)
        pools = poison(oomb_jax.create_pools(model, longer, few))
        assert pools.host is not None
        assert pools.host.dk.shape[1] == room - missing
        for _ in range(2):
            again, other, pools = step(model, pools, *arguments, few, batch.segments)
            if missing:
                assert np.isnan(again)
                assert all(np.isnan(x).any() for x in jax.tree.leaves(other))
                continue
            assert again == loss
            for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(grads), strict=True):
                np.testing.assert_array_equal(a, b)


def test_pools_with_other_room_than_the_settings_say_are_refused():
    model = oomb_jax.models.abstract("tiny")
    config = oomb_jax.Config(attention=oomb_jax.TopK(pages=2), page=8, chunk=16, hbm_layers=0, kv_grad_pages=5)
    pools = jax.eval_shape(lambda model: oomb_jax.create_pools(model, 100, config), model)
    for other in (None, 6):
        with pytest.raises(ValueError, match=f"gradients of 5 pages, config.kv_grad_pages={other}; make them with"):
            check_pools(pools, 100, dataclasses.replace(config, kv_grad_pages=other), gradients=True)
    check_pools(pools, 100, config, gradients=True)


def test_room_for_fewer_pages_is_for_top_k():
    with pytest.raises(ValueError, match="kv_grad_pages=3: at least 1, and with TopK"):
        oomb_jax.Config(kv_grad_pages=3)
