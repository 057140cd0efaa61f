"""What the benchmarks force Top-K attention to choose, and what they count."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax import chunk, selection
from oomb_jax.selection import TopK
from tests.gradients import random_model

R, M, H, P, S, K = 4, 2, 8, 40, 8, 5


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")


def choose(choice, first_page: int, scope: selection.Scope, *, seed: int = 0, repeated: bool = False):
    from selections import forced

    rng = np.random.default_rng((first_page, seed))
    q = jnp.asarray(rng.normal(size=(R * S, 2 * M, H)), jnp.float32)
    representatives = jnp.asarray(rng.normal(size=(P, M, H)), jnp.float32)
    with forced(choice, repeated=repeated):
        return np.asarray(chunk.select(TopK(pages=K, scope=scope), q, representatives, jnp.int32(first_page), page=S))


@pytest.mark.parametrize("scope", ["all_heads", "kv_head"])
@pytest.mark.parametrize("first_page", [3, 36])
def test_forced_choices_are_tables_of_earlier_pages(scope, first_page):
    tables = {choice: choose(choice, first_page, scope) for choice in ("model", "random", "same", "none")}
    assert chunk.select is selection.select  # and nothing stays behind
    for choice in "random", "same":
        table = tables[choice]
        assert table.shape == tables["model"].shape
        for row in table.reshape(-1, K):
            real = row[row >= 0]
            assert len(set(real)) == len(real) == min(K, first_page)
            assert (np.diff(real) > 0).all()
            assert real.max() < first_page
            assert (row[len(real) :] == -1).all()
    assert (tables["none"] == -1).all()
    distinct = {choice: len(np.unique(table[table >= 0])) for choice, table in tables.items()}
    assert distinct["same"] == min(K, first_page)
    if first_page > K:
        assert distinct["random"] > 2 * K
        assert (choose("random", first_page + 1, scope) != tables["random"]).any()
        assert (choose("random", first_page, scope, seed=1) != tables["random"]).any()
        once, again = (choose("random", first_page, scope, seed=seed, repeated=True) for seed in (0, 1))
        np.testing.assert_array_equal(once, again)
        assert (choose("random", first_page + 1, scope, repeated=True) != once).any()


def test_traffic_counts_each_page_once_a_pass():
    from selections import page_traffic

    tables = np.full((3, 2, R, K), -1, np.int32)
    tables[1, 0] = [0, 1, 2, -1, -1]
    tables[2, 0, :, 0] = [0, 3, 3, 5]
    tables[2, 1, 1, :2] = [4, 6]
    told = page_traffic(jnp.asarray(tables), kv_page=10**9, gradient_page=2 * 10**9)
    assert told["distinct_pages"] == round(8 / 6, 1)
    assert told["gigabytes"] == {"fill": 6, "recompute": 8, "backward": 8, "gradients": 32}
    assert told["gradient_pages"] == {"chosen": round(7 / 24, 4), "at_once": round(7 / 24, 4)}
    pairs = np.concatenate([tables, tables[2:]])[1:]  # chunks 1 and 2, then 2 alone
    told = page_traffic(jnp.asarray(pairs), kv_page=10**9, gradient_page=10**9, together=2)
    assert told["gigabytes"]["fill"] == len({0, 1, 2, 3, 5}) + len({0, 3, 5})


def test_gradient_pages_live_until_their_own_chunk():
    from selections import page_traffic

    tables = np.full((4, 2, R, K), -1, np.int32)
    tables[3, 0, 1, :3] = [8, 9, 10]  # of chunk 2, and done with it
    tables[1, 0, :, 0] = [0, 0, 1, 1]
    told = page_traffic(jnp.asarray(tables), kv_page=1, gradient_page=1)["gradient_pages"]
    assert told == {"chosen": round(5 / 32, 4), "at_once": round(3 / 32, 4)}


def test_gradient_error_falls_to_zero_with_all_pages():
    from topk_error import draw, measure, tables

    model = random_model(np.random.default_rng(0), layers=2, dtype=jnp.float32)
    tokens = jax.random.randint(jax.random.key(0), (120,), 0, 31, jnp.int32)
    records = measure(model, tokens, oomb_jax.Config(page=8, chunk=24), (1, 12))
    few, every = records
    assert every["error"] == 0
    assert every["loss"] == few["dense_loss"] != few["loss"]
    assert 0 < few["error"] < 2
    # The whole is a weighted mean of its parts.
    parts = np.concatenate([np.ravel(x) for x in few["by_weight"].values()])
    assert parts.min() < few["error"] < parts.max()
    assert np.shape(few["by_layer"]) == (2,)
    assert np.shape(few["by_weight"]["layers.q_proj.weight"]) == (2,)
    assert [table.row_count for table in tables(records)] == [1, len(few["by_weight"])]
    assert len(draw(records, "title").axes[0].lines) == 1
