"""Gradient pools with room for fewer than all pages: the same gradients, and NaN where the room does not suffice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax.gradient_slots import all_free, give_back, most_at_once, take
from tests.gradients import poison, random_batch, random_model

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")


def most(selection):
    """`most_at_once`, counted chunk by chunk."""
    n, L, rows = selection.shape[:3]
    found = []
    for layer in range(L):
        held, count = set(), []
        for c in reversed(range(n)):
            held -= set(range(c * rows, (c + 1) * rows))
            held |= {int(page) for page in selection[c, layer].ravel() if page >= 0}
            count.append(len(held))
        found.append(max(count))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_most_at_once_is_counted(seed):
    rng = np.random.default_rng(seed)
    n, L, rows, K = (int(rng.integers(1, most)) for most in (9, 4, 4, 5))
    selection = np.full((n, L, rows, K), -1)
    for c in range(1, n):
        selection[c] = rng.integers(-1, c * rows, selection[c].shape)
    assert list(most_at_once(jnp.asarray(selection, jnp.int32))) == most(selection)


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
    room = most(table)[0]
    slots, layer, had = all_free(2, n * rows, room), jnp.int32(1), {}
    for c in reversed(range(n)):
        slots = give_back(slots, layer, jnp.int32(c * rows), rows)
        had = {page: slot for page, slot in had.items() if page < c * rows}
        pages = rng.permutation(np.concatenate([chosen[c], [-1, -1]]))
        taken, fresh, slots = take(slots, layer, jnp.asarray(pages, jnp.int32))
        for page, slot, new in zip(pages.tolist(), taken.tolist(), fresh.tolist(), strict=True):
            if page < 0:
                assert slot == -1
                continue
            assert new == (page not in had)
            assert had.setdefault(page, slot) == slot
        assert len(set(had.values())) == len(had)
        assert all(0 <= slot < room for slot in had.values())
    np.testing.assert_array_equal(slots.of_page[0], -1)


@pytest.mark.parametrize("seed", range(4))
def test_few_slots_give_the_same_gradients_and_too_few_nan(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]
    model = random_model(rng, dtype=jnp.float32)
    page, rows = pick(8, 16), pick(1, 2, 3)
    config = oomb_jax.Config(
        attention=oomb_jax.TopK(pages=pick(1, 2), scope=pick("all_heads", "kv_head")),
        page=page,
        chunk=page * rows,
        remat="full",
        kv_dtype=pick(None, "float8_e4m3fn"),
        kv_grad_dtype=pick(None, "bfloat16"),
        hbm_layers=0,
    )
    batch = random_batch(rng, (int(page * rows * rng.uniform(6, 12)),), segments=bool(rng.integers(2)))
    arguments = batch.tokens, batch.labels
    longer = len(batch.tokens) + 3 * config.chunk
    pools = poison(oomb_jax.create_pools(model, longer, config))
    loss, grads, pools = step(model, pools, *arguments, config, batch.segments)
    used = -(-len(batch.tokens) // config.chunk)
    room = max(most(np.asarray(pools.selection)[:used]))
    assert 1 < room < used * rows
    for missing in (0, 1):
        few = dataclasses.replace(config, kv_grad_pages=room - missing)
        pools = poison(oomb_jax.create_pools(model, longer, few))
        assert pools.host.dk.shape[1] == room - missing
        for _ in range(2):
            again, other, pools = step(model, pools, *arguments, few, batch.segments)
            if missing:
                assert np.isnan(again)
                continue
            assert again == loss
            for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(grads), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


def test_room_for_fewer_pages_is_for_top_k():
    with pytest.raises(ValueError, match="kv_grad_pages=3: at least 1, and with TopK"):
        oomb_jax.Config(kv_grad_pages=3)
