"""Paged attention against the formula of its docstring, written without blocks, tables or running sums.

One suite for every implementation. Where there is a Hopper GPU, the kernels run on it: `JAX_PLATFORMS=cuda,cpu pytest
tests/pallas_kernels`.
"""

import dataclasses
import functools
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # there is no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels import device
from oomb_jax.pallas_kernels.paged_attention import (
    Window,
    by_page,
    mosaic,
    mosaic_vjp,
    paged_attention,
    paged_attention_vjp,
    reference,
    sinks_gradient,
)
from oomb_jax.pallas_kernels.paged_attention.cases import GPU, INTERPRETED, SMALL, Case, Inputs, inputs, named
from oomb_jax.pallas_kernels.rounding import stochastic_round
from oomb_jax.shapes import accumulator
from tests.tolerance import F64_GRADIENT, TIMES_PLAIN

OUTPUTS = "out", "lse", "dq", "dk_new", "dv_new", "dk_pool", "dv_pool", "sinks"


def definition(q, k_new, v_new, k_pages, v_pages, sinks, table, masks):
    """out and lse by one softmax over all keys of a row. k_pages, v_pages [P, M, S, H] are one layer's pages.

    For 16-bit inputs this is plain attention: 16-bit products and weights, a float32 softmax.
    """
    C, N, H = q.shape
    M, S, Q = k_pages.shape[1], k_pages.shape[2], C // table.shape[0]
    masks = jax.tree.map(np.asarray, masks)
    outs, lses = [], []
    for row, lists in enumerate(table.reshape(len(table), -1, table.shape[-1])):
        # Padding stands for page 0, masked, so that all rows have the same shapes and operations compile once.
        lists = np.broadcast_to(lists, (M, lists.shape[1]))
        ids, named, queries = np.maximum(lists, 0), lists >= 0, np.arange(row * Q, (row + 1) * Q)
        heads = lambda pages, ids=ids: pages[ids, np.arange(M)[:, None]].reshape(M, -1, H)
        k, v = (
            jnp.repeat(jnp.concatenate([heads(pages), own.swapaxes(0, 1)], axis=1).astype(q.dtype), N // M, axis=0)
            for pages, own in ((k_pages, k_new), (v_pages, v_new))
        )
        by_head = lambda pages, ids=ids: pages[ids].reshape(M, 1, -1)
        of_keys = lambda pages, own, by_head=by_head: np.concatenate([by_head(pages), np.tile(own, (M, 1, 1))], axis=2)
        earlier = np.broadcast_to(np.repeat(named, S, axis=1)[:, None], (M, Q, S * ids.shape[1]))
        causal = np.broadcast_to(queries[:, None] >= np.arange(C), (M, Q, C))
        mask = np.concatenate([earlier, causal], axis=2)
        if "page_lengths" in masks:
            mask &= of_keys(np.arange(S) < masks["page_lengths"][:, None], np.ones(C, bool))
        if "q_segments" in masks:
            documents = of_keys(masks["pool_segments"], masks["q_segments"])
            mask &= masks["q_segments"][queries, None] == documents
        if "window" in masks:
            size, q_start, starts = masks["window"]
            places = of_keys(starts[:, None] + np.arange(S), q_start + np.arange(C))
            mask &= q_start + queries[:, None] - places < size
        scores = jnp.einsum("qnh,nuh->nqu", q[queries], k).astype(accumulator(q.dtype)) / np.sqrt(H)
        scores = jnp.where(np.repeat(mask, N // M, axis=0), scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=2)
        if sinks is not None:
            lse = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
        weights = jnp.exp(scores - lse[:, :, None])
        lses.append(lse)
        outs.append(jnp.einsum("nqu,nuh->qnh", weights.astype(q.dtype), v))
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def by_definition(x, dtype):
    """The results in the order of OUTPUTS, of the pools what this chunk adds to them, with inputs of `dtype`."""
    *tensors, layer, table = x.forward
    table = np.asarray(table)
    q, k_new, v_new, *pools = (t.astype(dtype) for t in tensors)
    # Only named pages exist for the formula; the others hold NaN, here 0.
    exists = named(table, *pools[0].shape[1:3])[:, :, None, None]
    pages = [jnp.where(exists, pool[layer], 0) for pool in pools]
    formula = lambda q, k_new, v_new, k, v, sinks: definition(q, k_new, v_new, k, v, sinks, table, x.masks)
    (out, lse), vjp = jax.vjp(formula, q, k_new, v_new, *pages, x.sinks.get("sinks"))
    return out, lse, *vjp((x.d_out.astype(dtype), jnp.zeros_like(lse)))


def error(a, b):
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / max(1e-30, float(np.linalg.norm(b))))


def check_unbiased(draws, exact):
    """draws [n, ...]: `exact`, which is float32, rounded to bfloat16 with independent bits."""
    bits = np.asarray(exact).view(np.uint32)
    up = np.asarray(draws).view(np.uint16) - (bits >> 16).astype(np.uint16)
    assert (up <= 1).all()  # one of the two neighbours
    chance = np.broadcast_to((bits & 0xFFFF) / 2.0**16, up.shape)
    deviation, variance = up - chance, chance * (1 - chance)
    for low in np.arange(0, 1, 1 / 8):
        of_bin = (chance >= low) & (chance < low + 1 / 8)
        assert abs(deviation[of_bin].sum()) < 5 * np.sqrt(variance[of_bin].sum())
    # Neighbours along every axis, the draws' among them, know nothing of each other.
    inner = variance > 0.1
    residual = np.where(inner, deviation, 0) / np.sqrt(np.where(inner, variance, 1))
    for axis in range(residual.ndim):
        r = np.moveaxis(residual, axis, 0)
        products = r[1:] * r[:-1]
        assert abs(products.sum()) <= 5 * np.sqrt(np.count_nonzero(products))


class Suite:
    """Tests of one implementation. Subclasses list their cases."""

    forward = staticmethod(jax.jit(paged_attention))
    backward = staticmethod(jax.jit(paged_attention_vjp))

    def run(self, x):
        """All results, in the order of OUTPUTS, the pools whole."""
        out, lse = self.forward(*x.forward, **x.masks, **x.sinks)
        arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], out, lse, x.d_out
        sinks: Any = sinks_gradient(x.sinks["sinks"], out, lse, x.d_out) if x.sinks else None
        return out, lse, *self.backward(*arguments, **x.masks), sinks

    def check(self, case, bound):
        """bound(x, exact): the largest error of each output."""
        x = inputs(case, seed=0)
        results = self.run(x)
        layer, table = x.forward[5], np.asarray(x.forward[6])
        cpu = jax.devices("cpu")[0]
        x = Inputs(**{field.name: jax.device_put(getattr(x, field.name), cpu) for field in dataclasses.fields(x)})
        with jax.default_device(cpu):
            exact = by_definition(x, accumulator(case.dtype))
            bounds = bound(x, exact)
        unnamed = ~named(table, *x.dk_pool.shape[1:3])
        for name, result, want, most in zip(OUTPUTS, results, exact, bounds, strict=True):
            if want is None:  # no sinks
                continue
            result = np.asarray(result)
            if name in ("dk_pool", "dv_pool"):
                # Added to the pages of this layer, and nothing else touched.
                assert case.window or np.any(want) != (case.strangers or not case.earlier)
                before = np.asarray(getattr(x, name))
                assert (result[:, unnamed] == before[:, unnamed]).all()
                others = np.arange(len(before)) != int(layer)
                assert (result[others] == before[others]).all()
                result = (result.astype(np.float64) - before.astype(np.float64))[int(layer)]
                if case.gradient_dtype is not None:  # one rounding of the sum
                    scale = np.linalg.norm(before[int(layer)].astype(np.float64)) / np.linalg.norm(np.asarray(want))
                    most += 2.0**-8 * scale
            assert error(result, want) <= most, name
        return results

    def check_repeats(self, case):
        """The same bits in a second run, whose results take the place of NaN."""
        x = inputs(case, seed=1)
        results = self.run(x)
        first = [np.asarray(result).tobytes() for result in results if result is not None]
        # Freed at once: they leave no other memory of these sizes behind.
        nan = [jnp.full_like(result, jnp.nan) for result in results[:5] for _ in range(32)]
        jax.block_until_ready(nan)
        del results, nan
        # Bits: NaN of pages that nobody names included.
        assert first == [np.asarray(result).tobytes() for result in self.run(x) if result is not None]

    def check_lists_made_before(self, case):
        """The same bits with the table's lists by page, made for several tables at once."""
        x = inputs(case, seed=2)
        out, lse = self.forward(*x.forward, **x.masks)
        table = x.forward[6]
        arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], out, lse, x.d_out
        tables = jnp.stack([jnp.full_like(table, -1), table])
        _, P, M, S, _ = x.dk_pool.shape
        own = -(-len(x.forward[0]) // S)
        lists = jax.vmap(lambda table: by_page(table, P, own=own, heads=M))(tables)
        assert not np.array_equal(lists.queries.pages[0], lists.queries.pages[1])
        expected = self.backward(*arguments, **x.masks)
        for given, same in (1, True), (0, False):
            results = self.backward(*arguments, **x.masks, by_page=jax.tree.map(lambda a, given=given: a[given], lists))
            pairs = zip(expected, results, strict=True)
            assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs) == same

    def check_new_pools(self, case):
        """Without gradient pools the results are what is added to pools of zeros, where the table names a page."""
        x = inputs(case, seed=4)
        out, lse = self.forward(*x.forward, **x.masks)
        layer, touched = x.forward[5], named(x.forward[6], *x.dk_pool.shape[1:3])
        assert touched.any()

        def gradients(pool):
            arguments = *x.forward[:5], pool, pool, *x.forward[5:], out, lse, x.d_out
            *others, dk, dv = self.backward(*arguments, **x.masks)
            assert dk.dtype == dv.dtype == accumulator(case.dtype)
            # A sum with 0 is never -0.
            return *map(np.asarray, others), *(np.asarray(pool[layer])[touched] + 0 for pool in (dk, dv))

        zeros = jnp.zeros(x.dk_pool.shape, accumulator(case.dtype))
        for new, added in zip(gradients(None), gradients(zeros), strict=True):
            assert new.tobytes() == added.tobytes()

    def check_rounding(self, case, draws):
        """Narrow gradient pools are rounded once, to nearest or without bias."""
        x = inputs(case, seed=1)
        out, lse = self.forward(*x.forward)
        touched = named(x.forward[6], *x.dk_pool.shape[1:3])

        def pools(dtype, key=None):
            before = x.dk_pool.astype("bfloat16").astype(dtype), x.dv_pool.astype("bfloat16").astype(dtype)
            arguments = *x.forward[:5], *before, *x.forward[5:], out, lse, x.d_out
            after = jnp.stack(self.backward(*arguments, rounding_key=key)[3:])
            return np.asarray(after[:, x.forward[5]])[:, touched]

        exact = pools("float32")
        assert (pools("bfloat16") == exact.astype("bfloat16")).all()
        drawn = [pools("bfloat16", jax.random.key(i)) for i in range(draws)]
        assert (drawn[0] == pools("bfloat16", jax.random.key(0))).all()
        check_unbiased(np.stack(drawn), exact)


class TestReference(Suite):
    @pytest.mark.parametrize("case", SMALL, ids=str)
    def test_results_are_those_of_the_formula(self, case):
        with jax.enable_x64(True):
            case = dataclasses.replace(case, dtype="float64")
            self.check(case, lambda x, exact: [F64_GRADIENT] * len(OUTPUTS))

    def test_new_gradient_pools(self):
        self.check_new_pools(SMALL[1])

    @pytest.mark.parametrize(
        "case",
        [
            Case(C=16, M=1, G=2, H=8, S=8, earlier=3),
            Case(C=32, M=1, G=1, H=8, S=8, earlier=4, rows=4, spare=0),  # pages that several rows name
            Case(C=64, M=2, G=1, H=8, S=8, earlier=3, rows=8, by_head=True, spare=0),
        ],
        ids=str,
    )
    def test_narrow_gradient_pools_are_rounded_once(self, case, monkeypatch):
        # Blocks of a page each: the rows that name a page add to it in different blocks.
        monkeypatch.setattr(reference, "_block_budget", lambda: 1)
        self.check_rounding(case, draws=200)


def at_most_plain(case):
    """At most twice the error that plain attention in the case's dtype makes."""
    return lambda x, exact: [
        0.0 if want is None else TIMES_PLAIN * error(got, want)
        for got, want in zip(by_definition(x, case.dtype), exact, strict=True)
    ]


def interpreted(function, **options):
    """The function, done when it returns: the interpreter calls JAX, where on few cores it may wait for operations that
    were asked for meanwhile and wait for its results."""
    function = jax.jit(functools.partial(function, **options))
    return lambda *arguments, **more: jax.block_until_ready(function(*arguments, **more))


class TestMosaicInterpreted(Suite):
    """The interpreter gives kernels results and scratch memory that hold NaN."""

    options: ClassVar = {"q_segments": None, "pool_segments": None, "interpret": plgpu.InterpretGPUParams()}
    forward = staticmethod(interpreted(mosaic.forward, **options))
    backward = staticmethod(interpreted(mosaic_vjp.backward, **options))

    @pytest.mark.parametrize("case", INTERPRETED, ids=str)
    def test_results_are_as_good_as_plain_attention(self, case):
        self.check(case, at_most_plain(case))

    def test_narrow_gradient_pools_are_rounded_once(self):
        self.check_rounding(Case(C=64, M=1, G=1, H=64, S=64, earlier=2, spare=1, dtype="bfloat16"), draws=4)

    def test_new_gradient_pools(self):
        self.check_new_pools(INTERPRETED[1])

    def test_lists_made_before(self):
        self.check_lists_made_before(Case(C=128, M=2, G=1, H=64, S=64, earlier=3, rows=2, dtype="bfloat16"))

    def test_nothing_races(self):
        case = Case(C=256, M=1, G=5, H=64, S=64, earlier=5, rows=2, segments=True, dtype="bfloat16")
        options = self.options | {"interpret": plgpu.InterpretGPUParams(detect_races=True)}
        x = inputs(case, seed=3)
        out, lse = interpreted(mosaic.forward, **options | x.masks)(*x.forward)
        assert not get_races().races_found
        arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], out, lse, x.d_out
        interpreted(mosaic_vjp.backward, **options | x.masks)(*arguments)
        assert not get_races().races_found


HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability.startswith("9.")


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestMosaic(Suite):
    forward = staticmethod(jax.jit(functools.partial(paged_attention, implementation="mosaic")))
    backward = staticmethod(jax.jit(functools.partial(paged_attention_vjp, implementation="mosaic")))

    @pytest.mark.parametrize("case", GPU, ids=str)
    def test_results_are_as_good_as_plain_attention(self, case):
        self.check(case, at_most_plain(case))
        self.check_repeats(case)

    def test_narrow_gradient_pools_are_rounded_once(self):
        case = Case(C=256, M=2, G=3, H=128, S=128, earlier=20, rows=2, dtype="bfloat16")
        self.check_rounding(case, draws=20)
        self.check_rounding(dataclasses.replace(case, earlier=10, by_head=True), draws=2)

    def test_new_gradient_pools(self):
        self.check_new_pools(Case(C=512, M=2, G=7, H=128, S=128, earlier=9, rows=4, dtype="bfloat16"))

    def test_rows_of_the_same_pages_give_the_bits_of_one_row(self):
        case = Case(C=512, M=2, G=3, H=128, S=128, earlier=5, dtype="bfloat16")
        x = inputs(case, seed=2)
        by_row = dataclasses.replace(x, forward=(*x.forward[:6], jnp.repeat(x.forward[6], 4, axis=0)))
        by_head = dataclasses.replace(x, forward=(*x.forward[:6], jnp.repeat(by_row.forward[6][:, None], 2, axis=1)))
        for one, *others in zip(*(self.run(y)[:7] for y in (x, by_row, by_head)), strict=True):
            for other in others:
                assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_rounding_in_kernels_leaves_alone_what_it_must():
    largest, infinity = np.float32(jnp.finfo(jnp.bfloat16).max), np.float32(np.inf)
    x = np.array([np.finfo(np.float32).max, np.finfo(np.float32).min, infinity, -infinity, -0.0, 1.5], np.float32)
    payloads = np.array([0x7F800001, 0xFFFFFFFF, 0xFF80FFFF, 0x7FC00000], np.uint32).view(np.float32)
    for bits in 0, 2**31 + 12345, 2**32 - 1:
        rounded = stochastic_round(jnp.concatenate([x, payloads]), jnp.uint32(bits)).astype(jnp.bfloat16)
        rounded = np.asarray(rounded).astype(np.float32)
        np.testing.assert_array_equal(rounded[:6], [largest, -largest, infinity, -infinity, -0.0, 1.5])
        assert np.signbit(rounded[4])
        assert np.isnan(rounded[6:]).all()


def test_wrong_arguments_are_refused():
    x = inputs(SMALL[1], seed=0)
    q, k_new, v_new, k_pool, v_pool, layer, table = x.forward
    with pytest.raises(ValueError, match="5 query heads over 2"):
        paged_attention(q[:, :5], k_new, v_new, k_pool, v_pool, layer, table)
    with pytest.raises(ValueError, match="each row serves the same number"):
        paged_attention(q, k_new, v_new, k_pool, v_pool, layer, jnp.repeat(table, 5, axis=0))
    with pytest.raises(ValueError, match=r"table \(1, 3, 8\) for 2 key/value heads"):
        paged_attention(q, k_new, v_new, k_pool, v_pool, layer, jnp.repeat(table[:, None], 3, axis=1))
    with pytest.raises(ValueError, match="go together"):
        paged_attention(*x.forward, q_segments=jnp.zeros(16, jnp.int32))
    with pytest.raises(ValueError, match="dk_pool and dv_pool go together"):
        paged_attention_vjp(q, k_new, v_new, k_pool, v_pool, x.dk_pool, None, layer, table, q, q[:, :, 0].T, q)
    gradients = q, k_new, v_new, k_pool, v_pool, x.dk_pool, x.dv_pool, layer, table, q, q[:, :, 0].T, q
    own = -(-len(q) // k_pool.shape[3])
    with pytest.raises(ValueError, match=r"by_page: \(1, 3\) pages and \(\d+,\) .* are \(1, 8\) and"):
        paged_attention_vjp(*gradients, by_page=by_page(table[:, :3], k_pool.shape[1], own=own, heads=2))
    with pytest.raises(
        ValueError, match=r"by_page: \(1, 8\) pages and \(\d+,\) .* are \(1, 8\) and \(\d+,\): use by_page"
    ):
        paged_attention_vjp(*gradients, by_page=by_page(table, k_pool.shape[1], own=own + 1, heads=2))
    with pytest.raises(ValueError, match="window of 0 tokens"):
        paged_attention(*x.forward, window=Window(0, 16, jnp.zeros(k_pool.shape[1], jnp.int32)))
    with pytest.raises(NotImplementedError, match="'mosaic': queries of float32"):
        paged_attention(*x.forward, implementation="mosaic")


@pytest.mark.parametrize("heads_share", [True, False])
def test_the_largest_pieces_of_work_come_first(heads_share):
    rng = np.random.default_rng(0)
    R, M, K, P, own = 4, 2, 6, 16, 8
    table = rng.permuted(np.tile(np.arange(P), (R, M, 1)), axis=2)[..., :K].astype(np.int32)
    table[0, 0, 2:] = -1
    if heads_share:
        table = table[:, 0]
    queries, order = by_page(jnp.asarray(table), P, own=own, heads=M)
    U = queries.pages.shape[1]
    per_head = table[:, None].repeat(M, 1) if heads_share else table
    work = []
    for head in range(M):
        pages = np.asarray(queries.pages)[0 if heads_share else head]
        # Of a chunk of 8 pages each row has the queries of two.
        work += [2 * (per_head[:, head] == page).sum() if page >= 0 else 0 for page in pages]
        work += [own - page for page in range(own)]
    assert len(work) == M * (U + own)
    assert order.tolist() == sorted(range(len(work)), key=lambda i: -work[i])


def test_kernels_run_where_they_can_and_it_is_told_once(monkeypatch, caplog):
    x = inputs(Case(C=64, M=1, G=2, H=64, S=64, earlier=1, dtype="bfloat16", window=70), seed=0)
    ran = []

    def kernel(function, *arguments, by_page=None, **options):
        ran.append(function)
        return function(*arguments, **options, window=None)

    monkeypatch.setattr(mosaic, "forward", functools.partial(kernel, reference.forward))
    monkeypatch.setattr(mosaic_vjp, "backward", functools.partial(kernel, reference.backward))
    caplog.set_level("INFO")
    device._log_once.cache_clear()

    def call():
        out, lse = paged_attention(*x.forward)
        arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], out, lse, x.d_out
        paged_attention_vjp(*arguments)
        paged_attention(*x.forward, **x.masks)
        paged_attention(*x.forward)

    call()
    assert not ran
    assert not caplog.messages  # nobody expects kernels on a CPU
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(device, "current_device", lambda: hopper)
    call()
    assert ran == [reference.forward, reference.backward, reference.forward]
    why = "a sliding window, which only the reference has"
    assert caplog.messages == [
        "paged attention, forward: mosaic",
        "paged attention, backward: mosaic",
        f"paged attention, forward: reference; not mosaic: {why}; not triton: {why}",
    ]
    with pytest.raises(NotImplementedError, match="'mosaic': a sliding window"):
        paged_attention(*x.forward, **x.masks, implementation="mosaic")
    hopper.compute_capability = "8.0"
    paged_attention(*x.forward)
    assert len(ran) == 3
    assert "forward: reference; not mosaic: no Hopper GPU (H100, H200); not triton: " in caplog.messages[-1]
    with pytest.raises(ValueError, match="'cuda': None, or one of"):
        device.choose("x", "cuda", {"mosaic": None})
