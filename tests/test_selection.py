"""Top-K selection against its definition, in loops; masked full attention; the recorded choices of the reference.

`golden/reference_sparse` holds what the published implementation (arXiv 2602.02108) chose and the gradients it computed
for the model and ids of `golden/reference_dense`, with 4 pages of 64 tokens and chunks of 1,024.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from safetensors.flax import load_file

import oomb_jax
from oomb_jax import selection
from oomb_jax.full_attention import attention, selected
from oomb_jax.parts import layer_at, split
from oomb_jax.selection import Scope, TopK, select, stage
from tests.gradients import errors_by_tensor, gradient_error, random_batch, random_model
from tests.tolerance import F64_GRADIENT, SPARSE_REFERENCE_MEDIAN, SPARSE_REFERENCE_WORST

SCOPES: tuple[Scope, ...] = ("all_heads", "kv_head")
GOLDEN = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class Problem:
    """A chunk, the pages of a pool and a rule. Pages from the chunk on hold NaN."""

    attention: TopK
    page: int
    q: np.ndarray
    keys: np.ndarray  # [P, S, M, H]
    first_page: int
    tokens: int  # real ones of the chunk
    segments: np.ndarray | None  # of all tokens of the pool

    @property
    def pages(self):
        return len(self.keys)

    @property
    def rows(self):
        return len(self.q) // self.page

    def chosen(self, select=select):
        S, M, H = self.keys.shape[1:]
        representatives = selection.representatives(jnp.asarray(self.keys).reshape(-1, M, H), S)
        ids = {}
        if self.segments is not None:
            by_page = jnp.asarray(self.segments, jnp.int32).reshape(self.pages, S)
            own = by_page[self.first_page : self.first_page + self.rows].reshape(-1)
            ids = {"q_segments": own, "pool_segments": by_page}
        first_page, tokens = jnp.int32(self.first_page), jnp.int32(self.tokens)
        table = select(self.attention, jnp.asarray(self.q), representatives, first_page, page=S, tokens=tokens, **ids)
        assert table.dtype == jnp.int32
        return np.asarray(table)


def random_problem(seed):
    """Odd page counts, groups of 1 to 7, K from 1 to more than there are pages, segments in two of three."""
    rng = np.random.default_rng(seed)
    S, M, G, H = int(rng.choice([8, 12])), int(rng.integers(1, 4)), int(rng.choice([1, 3, 7])), 8
    rows, pages = int(rng.integers(1, 6)), int(rng.integers(20, 50))
    first_page = 0 if seed == 0 else int(rng.integers(1, pages - rows + 1))
    K = [1, 5, 9, 64][seed % 4]
    first = int(rng.integers(0, 1 + K // 2))
    attention = TopK(
        pages=K,
        scope=SCOPES[int(rng.integers(2))],
        first_pages=first,
        local_pages=int(rng.integers(0, min(3, 1 + K - first))),
        scaled=bool(rng.integers(2)),
    )
    keys = rng.normal(size=(pages, S, M, H)) * np.sqrt(S)
    keys[first_page:] = np.nan
    segments = np.cumsum(rng.random(pages * S) < 0.01) if seed % 3 else None
    return Problem(
        attention=attention,
        page=S,
        q=rng.normal(size=(rows * S, M * G, H)) * 0.3,
        keys=keys,
        first_page=first_page,
        tokens=rows * S if seed % 2 else int(rng.integers(1, rows * S + 1)),
        segments=segments,
    )


def definition(x: Problem):
    """For each query page and list, the ids that the rule chooses."""
    S, M, H = x.keys.shape[1:]
    G = x.q.shape[1] // M
    segments = np.zeros(x.pages * S, int) if x.segments is None else x.segments
    pages, own = segments.reshape(-1, S), segments[x.first_page * S :]
    means = x.keys.mean(axis=1)
    rows = []
    for r in range(x.rows):
        queries = [i for i in range(r * S, (r + 1) * S) if i < x.tokens]
        candidates = [p for p in range(x.first_page) if set(pages[p]) & {own[i] for i in queries}]
        queries = [i for i in queries if own[i] in {d for p in candidates for d in pages[p]}]
        scores = np.zeros((M, len(candidates)))
        for i in queries:
            for m in range(M):
                logits = [sum(x.q[i, m * G + g] @ means[p, m] for g in range(G)) for p in candidates]
                weights = np.exp(np.array(logits) / (np.sqrt(H) if x.attention.scaled else 1))
                scores[m] += weights / weights.sum()
        if x.attention.scope == "all_heads":
            scores = scores.sum(axis=0, keepdims=True)
        last = len(candidates) - x.attention.local_pages
        forced = {p for j, p in enumerate(candidates) if j < x.attention.first_pages or j >= last}
        lists = []
        for of_page in scores:
            rank = [(p not in forced, -score, p) for p, score in zip(candidates, of_page, strict=True)]
            lists.append(sorted(p for *_, p in sorted(rank)[: x.attention.pages]))
        rows.append(lists)
    return rows


def lists(table):
    """[R, K] or [R, M, K] -> ids of each row and list; that padding comes last is checked."""
    table = table.reshape(len(table), -1, table.shape[-1])
    for ids in table.reshape(-1, table.shape[-1]):
        assert (ids[np.sum(ids >= 0) :] == -1).all()
    return [[[int(p) for p in ids if p >= 0] for ids in row] for row in table]


@pytest.mark.parametrize("seed", range(12))
def test_choice_is_that_of_the_definition(seed):
    x = random_problem(seed)
    with jax.enable_x64(True):
        table = x.chosen()
    heads = () if x.attention.scope == "all_heads" else (x.keys.shape[2],)
    assert table.shape == (x.rows, *heads, min(x.attention.pages, x.pages))
    assert lists(table) == definition(x)


def test_equal_scores_choose_the_lower_ids():
    x = dataclasses.replace(random_problem(5), attention=TopK(pages=3), segments=None, first_page=11)
    x.q[:] = abs(x.q)
    x.keys[:11] = abs(x.keys[0])
    x.keys[6] *= 2
    assert (dataclasses.replace(x, tokens=len(x.q)).chosen() == [0, 1, 6]).all()


def test_choice_does_not_depend_on_the_blocks_of_scores(monkeypatch):
    x = next(x for x in map(random_problem, range(5, 50)) if x.rows == 4)
    whole = x.chosen()
    monkeypatch.setattr("oomb_jax.pallas_kernels.page_score.reference.BLOCK_BYTES", 1)
    np.testing.assert_array_equal(x.chosen(), whole)


def test_pages_are_still_earlier_ones_where_training_has_diverged():
    x = dataclasses.replace(random_problem(1), attention=TopK(pages=64), segments=None, first_page=9)
    x.q[:] = np.nan
    assert (x.chosen()[:, :10] == [*range(9), -1]).all()


def test_a_document_chooses_the_same_whatever_follows_it():
    x = dataclasses.replace(random_problem(3), attention=TopK(pages=4), first_page=9, segments=None)
    length = len(x.q) - x.page - 3  # ends within a page
    alone = dataclasses.replace(x, tokens=length).chosen()
    segments = np.zeros(x.pages * x.page, np.int32)
    segments[9 * x.page + length :] = 1
    packed = dataclasses.replace(x, tokens=len(x.q), segments=segments)
    np.testing.assert_array_equal(packed.chosen(), alone)
    # What the others hold decides nothing, and padding neither.
    x.q[length:] *= -100
    np.testing.assert_array_equal(packed.chosen(), alone)
    np.testing.assert_array_equal(dataclasses.replace(x, tokens=length).chosen(), alone)
    assert (alone[-1] == -1).all()


@pytest.mark.parametrize("seed", range(8))
def test_distinct_pages_get_slots_of_their_own(seed):
    rng = np.random.default_rng(seed)
    P = int(rng.integers(1, 60))
    shape = (int(rng.integers(1, 6)), *[3] * (seed % 2), int(rng.integers(1, 12)))
    table = rng.integers(-1, P, shape)
    table = np.where(rng.random(shape) < [0.3, 1.0][seed == 3], table, -1)  # once nothing at all
    pages, slots = jax.jit(stage, static_argnums=1)(jnp.asarray(table, jnp.int32), P)
    assert pages.shape == (min(P, table.size),)
    distinct = np.unique(table[table >= 0])
    np.testing.assert_array_equal(pages, [*distinct, *[-1] * (len(pages) - len(distinct))])
    assert (slots[table < 0] == -1).all()
    np.testing.assert_array_equal(pages[slots[table >= 0]], table[table >= 0])
    assert selection.distinct_pages(jnp.asarray(table, jnp.int32)) == len(distinct)


def test_attention_share_counts_pairs():
    rng = np.random.default_rng(0)
    n, L, R, M, K, S = 4, 2, 3, 2, 5, 8
    own = np.tril(np.ones((R * S, R * S)))
    computed = dense = 0
    tables = np.full((n, L, R, M, K), -1)
    for index in np.ndindex(n, L, R, M):
        count = int(rng.integers(0, 1 + min(K, index[0] * R)))
        tables[index][:count] = np.sort(rng.choice(index[0] * R, count, replace=False)) if count else 0
        computed += count * S * S
        dense += index[0] * R * S * S
    computed, dense = (pairs + n * L * M * own.sum() for pairs in (computed, dense))
    share = selection.attention_share(jnp.asarray(tables, jnp.int32), S)
    np.testing.assert_allclose(share, computed / dense, rtol=1e-6)
    assert selection.attention_share(jnp.asarray(tables[:1], jnp.int32), S) == 1


@pytest.mark.parametrize("seed", [1, 2, 6, 11])
def test_attention_mass_is_that_of_dense_attention(seed):
    x = random_problem(seed)
    rng = np.random.default_rng(seed)
    S, M, H = x.keys.shape[1:]
    k_new = rng.normal(size=(len(x.q), M, H))
    sample = rng.choice(x.rows, size=min(2, x.rows), replace=False)
    own, earlier = x.first_page * S, x.keys[: x.first_page].reshape(-1, M, H)
    segments = np.zeros(x.pages * S, np.int32) if x.segments is None else x.segments
    keys = np.concatenate([earlier, k_new])
    expected = np.zeros(2)
    with jax.enable_x64(True):
        table = x.chosen()
        by_list = lists(table)
        for r in sample:
            for i in range(r * S, (r + 1) * S):
                for head in range(x.q.shape[1]):
                    m = head // (x.q.shape[1] // M)
                    weights = np.exp(keys[: own + i + 1, m] @ x.q[i, head] / np.sqrt(H))
                    weights *= segments[: own + i + 1] == segments[own + i]
                    by_page = weights[:own].reshape(-1, S).sum(axis=1) / weights.sum()
                    expected += by_page[by_list[r][m % len(by_list[r])]].sum(), by_page.sum()
        ids = {}
        if x.segments is not None:
            by_page = jnp.asarray(segments, jnp.int32).reshape(-1, S)
            ids = {"q_segments": by_page.reshape(-1)[own : own + len(x.q)], "pool_segments": by_page}
        pool = jnp.full((2, x.pages, M, S, H), jnp.nan).at[1].set(jnp.asarray(x.keys).swapaxes(1, 2))
        chosen, all_earlier = jax.jit(selection.attention_mass)(
            *(jnp.asarray(x.q), jnp.asarray(k_new), pool, jnp.int32(1), jnp.int32(x.first_page), jnp.asarray(table)),
            jnp.asarray(sample, jnp.int32),
            **ids,
        )
    np.testing.assert_allclose([chosen, all_earlier], expected, rtol=F64_GRADIENT)


def forward(model, tokens, attention_settings, config, forced=None):
    """What every layer of a model chooses, [L, pages, *M, K]; forced: what its attention uses instead."""
    outer, layers = split(model)
    T, rows = len(tokens), config.chunk // config.page
    pages = -(-T // config.chunk) * rows
    causal = jnp.tri(T, dtype=bool)[None]

    @jax.jit
    def layer(h, l, forced):
        part = layer_at(layers, l)
        q, k, v = part.attention_inputs(h, jnp.arange(T))
        whole = lambda x: jnp.pad(x, ((0, pages * config.page - T), (0, 0), (0, 0)))
        representatives = selection.representatives(whole(k), config.page)
        pick = lambda c, q: select(
            *(attention_settings, q, representatives, c * rows),
            page=config.page,
            tokens=jnp.minimum(config.chunk, T - c * config.chunk),
        )
        chunks = jnp.arange(pages // rows), whole(q).reshape(-1, config.chunk, *q.shape[1:])
        chosen = jax.lax.map(lambda x: pick(*x), chunks)
        chosen = chosen.reshape(pages, *chosen.shape[2:])
        used = chosen if forced is None else forced
        return part.attention_output(h, attention(q, k, v, causal & selected(used, T, config))), chosen

    h, tables = outer.embed(tokens), []
    for l in range(model.config.num_hidden_layers):
        h, table = layer(h, l, None if forced is None else forced[l])
        tables.append(table)
    return jnp.stack(tables)


def recorded():
    """The golden tokens, the reference's choice [L, pages, K] and its gradients."""
    tokens = load_file(GOLDEN / "reference_dense" / "gradients.safetensors")["input_ids"][0]
    gradients = load_file(GOLDEN / "reference_sparse" / "gradients.safetensors")
    nothing = jnp.full((16, 4), -1, jnp.int32)  # before the first chunk there is nothing to choose
    layers = [
        jnp.concatenate([nothing, *(gradients.pop(f"select.layer{l}.chunk{c}")[0] for c in (1, 2, 3))])
        for l in range(3)
    ]
    return tokens, jnp.stack(layers), gradients


def test_choice_is_that_of_the_reference():
    """Each layer gets the inputs that it had in the reference, where the layers below used the recorded pages: a near
    tie that falls the other way changes all layers above it."""
    model = oomb_jax.models.load(GOLDEN / "reference_dense", dtype=jnp.float32)
    tokens, expected, _ = recorded()
    config = oomb_jax.Config(chunk=1024, page=64)
    tables = forward(model, tokens, TopK(pages=4), config, forced=expected)
    pairs = zip(*(x[:, 16:].reshape(-1, 4) for x in (tables, expected)), strict=True)
    agreeing = [len(np.intersect1d(*pair)) for pair in pairs]
    assert (tables[:, :16] == -1).all()
    assert sum(agreeing) >= 0.97 * 4 * len(agreeing)


def test_gradients_under_its_choice_are_those_of_the_reference(tmp_path):
    model = oomb_jax.models.load(GOLDEN / "reference_dense", dtype=jnp.float32)
    tokens, chosen, expected = recorded()
    T = len(tokens)
    labels = jnp.roll(tokens, -1).at[-1].set(-100)
    config = oomb_jax.Config(chunk=1024, page=64)
    loss, grads, _ = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")(
        model, None, tokens, labels, config, selection=chosen
    )
    np.testing.assert_allclose(loss * (T - 1) / T, 6.2890625, rtol=2**-8)  # itself rounded to bfloat16
    errors = errors_by_tensor(grads, expected, (T - 1) / T, tmp_path)
    assert np.median(errors) <= SPARSE_REFERENCE_MEDIAN
    assert np.max(errors) <= SPARSE_REFERENCE_WORST


def random_tables(rng, shape, config):
    """Rising ids of pages before the chunk in random number; shape: [..., pages, K] or [..., pages, M, K]."""
    rows, axis = config.chunk // config.page, 2 if len(shape) > 3 else 1
    tables = np.full(shape, -1)
    for index in np.ndindex(*shape[:-1]):
        before = index[axis] // rows * rows
        count = int(rng.integers(0, 1 + min(before, shape[-1])))
        tables[index][:count] = np.sort(rng.permutation(before)[:count])
    return tables


@pytest.mark.parametrize("per_head", [False, True])
def test_full_attention_to_chosen_pages(per_head):
    """No query feels a page that its query page and list did not choose, and all feel the others."""
    rng = np.random.default_rng(int(per_head))
    config = oomb_jax.Config(page=8, chunk=16)
    T, M = 53, 2
    q, k, v = (jnp.asarray(rng.normal(size=(T, heads, 4)), jnp.float32) for heads in (2 * M, M, M))
    table = random_tables(rng, (1, 8, *[M] * per_head, 3), config)[0]
    mask = selected(jnp.asarray(table, jnp.int32), T, config) & jnp.tri(T, dtype=bool)[None]
    jacobian = jax.jacobian(lambda v: attention(q, k, v, mask))(v)
    felt = np.asarray(abs(jacobian).sum(axis=(2, 5)) > 0)  # [T, 2 M, T, M]
    for t, head, u in np.ndindex(T, 2 * M, T):
        chosen = table[t // 8] if not per_head else table[t // 8, head // 2]
        assert felt[t, head, u, head // 2] == (u <= t and (u // 16 == t // 16 or u // 8 in chosen))


@pytest.mark.parametrize(("batch", "per_head"), [((), True), ((2,), False)])
def test_gradients_with_all_pages_chosen_are_those_of_dense_attention(batch, per_head):
    rng = np.random.default_rng(3)
    model = random_model(rng, group=3, kv_heads=2, dtype=jnp.float32)
    batch_ = random_batch(rng, (*batch, 61), segments=True)
    config = oomb_jax.Config(page=8, chunk=24)
    before = np.arange(9) // 3 * 3
    everything = np.where(np.arange(9) < before[:, None], np.arange(9), -1)
    everything = everything[:, None].repeat(2, axis=1) if per_head else everything
    tables = jnp.asarray(np.broadcast_to(everything, (*batch, 2, *everything.shape)), jnp.int32)
    step = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")
    arguments = model, None, batch_.tokens, batch_.labels, config, batch_.segments
    loss, dense, _ = step(*arguments)
    sparse_loss, sparse, _ = step(*arguments, selection=tables)
    assert sparse_loss == loss
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), sparse, dense)))
    fewer = step(*arguments, selection=jnp.full_like(tables, -1))[1]
    assert gradient_error(fewer, dense)[0] > 0.01
    with pytest.raises(ValueError, match=r"selection has shape"):
        step(*arguments, selection=tables[None])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pages": 0}, "pages=0: at least 1"),
        ({"rule": "max"}, "rule='max'"),
        ({"scope": "head"}, "scope='head'"),
        ({"first_pages": -1}, "first_pages=-1"),
        ({"pages": 4, "first_pages": 3, "local_pages": 2}, "raise pages to 5"),
    ],
)
def test_wrong_settings_are_refused(settings, message, untyped):
    with pytest.raises(ValueError, match=message):
        TopK(**settings)


@pytest.fixture
def untyped():
    """As users call, without the suite's type checks: these would refuse a wrong argument first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
