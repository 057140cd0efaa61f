"""Paged attention against the formula of its docstring, written without blocks, tables or running sums.

One suite for every implementation. Where there is a Hopper GPU, the kernels run on it: `JAX_PLATFORMS=cuda,cpu pytest
tests/pallas_kernels`.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # there is no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels.paged_attention import (
    Window,
    api,
    mosaic,
    mosaic_vjp,
    paged_attention,
    paged_attention_vjp,
    sinks_gradient,
)
from oomb_jax.pallas_kernels.paged_attention.cases import GPU, INTERPRETED, SMALL, Case, Inputs, inputs
from oomb_jax.pallas_kernels.paged_attention.mosaic_rounding import stochastic_round
from oomb_jax.shapes import accumulator
from tests.tolerance import F64_GRADIENT, TIMES_PLAIN

OUTPUTS = "out", "lse", "dq", "dk_new", "dv_new", "dk_pool", "dv_pool", "sinks"


def definition(q, k_new, v_new, k_pages, v_pages, sinks, table, masks):
    """out and lse by one softmax over all keys of a row. k_pages, v_pages [P, M, S, H] are one layer's pages.

    For 16-bit inputs this is plain attention: 16-bit products and weights, a float32 softmax.
    """
    C, N, H = q.shape
    S, Q = k_pages.shape[2], C // table.shape[0]
    masks = jax.tree.map(np.asarray, masks)
    outs, lses = [], []
    for row, ids in enumerate(table):
        # Padding stands for page 0, masked, so that all rows have the same shapes and operations compile once.
        ids, named, queries = np.maximum(ids, 0), ids >= 0, np.arange(row * Q, (row + 1) * Q)
        flat = lambda pages, ids=ids: pages[ids].swapaxes(1, 2).reshape(-1, *k_new.shape[1:])
        k, v = (
            jnp.repeat(jnp.concatenate([flat(pages), own]).astype(q.dtype), N // own.shape[1], axis=1)
            for pages, own in ((k_pages, k_new), (v_pages, v_new))
        )
        of_keys = lambda pages, own, ids=ids: np.concatenate([pages[ids].ravel(), own])
        mask = np.concatenate([np.tile(np.repeat(named, S), (Q, 1)), queries[:, None] >= np.arange(C)], axis=1)
        if "page_lengths" in masks:
            mask &= of_keys(np.arange(S) < masks["page_lengths"][:, None], np.ones(C, bool))
        if "q_segments" in masks:
            documents = of_keys(masks["pool_segments"], masks["q_segments"])
            mask &= masks["q_segments"][queries, None] == documents
        if "window" in masks:
            size, q_start, starts = masks["window"]
            places = of_keys(starts[:, None] + np.arange(S), q_start + np.arange(C))
            mask &= q_start + queries[:, None] - places < size
        scores = jnp.einsum("qnh,unh->nqu", q[queries], k).astype(accumulator(q.dtype)) / np.sqrt(H)
        scores = jnp.where(mask[None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=2)
        if sinks is not None:
            lse = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
        weights = jnp.exp(scores - lse[:, :, None])
        lses.append(lse)
        outs.append(jnp.einsum("nqu,unh->qnh", weights.astype(q.dtype), v))
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def by_definition(x, dtype):
    """The results in the order of OUTPUTS, of the pools what this chunk adds to them, with inputs of `dtype`."""
    *tensors, layer, table = x.forward
    table = np.asarray(table)
    named = np.unique(table[table >= 0])
    q, k_new, v_new, *pools = (t.astype(dtype) for t in tensors)
    # Only named pages exist for the formula; the others hold NaN, here 0.
    pages = [jnp.zeros_like(pool[0]).at[named].set(pool[layer, named]) for pool in pools]
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
        unnamed = np.setdiff1d(np.arange(x.dk_pool.shape[1]), table)
        for name, result, want, most in zip(OUTPUTS, results, exact, bounds, strict=True):
            if want is None:  # no sinks
                continue
            result = np.asarray(result)
            if name in ("dk_pool", "dv_pool"):
                # Added to the pages of this layer, and nothing else touched.
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

    def check_rounding(self, case, draws):
        """Narrow gradient pools are rounded once, to nearest or without bias."""
        x = inputs(case, seed=1)
        out, lse = self.forward(*x.forward)
        named = np.unique(x.forward[6][x.forward[6] >= 0])

        def pools(dtype, key=None):
            before = x.dk_pool.astype("bfloat16").astype(dtype), x.dv_pool.astype("bfloat16").astype(dtype)
            arguments = *x.forward[:5], *before, *x.forward[5:], out, lse, x.d_out
            after = jnp.stack(self.backward(*arguments, rounding_key=key)[3:])
            return np.asarray(after[:, x.forward[5], named])

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

    def test_narrow_gradient_pools_are_rounded_once(self):
        self.check_rounding(Case(C=16, M=1, G=2, H=8, S=8, earlier=3), draws=200)


def at_most_plain(case):
    """At most twice the error that plain attention in the case's dtype makes."""
    return lambda x, exact: [
        0.0 if want is None else TIMES_PLAIN * error(got, want)
        for got, want in zip(by_definition(x, case.dtype), exact, strict=True)
    ]


class TestMosaicInterpreted(Suite):
    """The interpreter gives kernels results and scratch memory that hold NaN."""

    options: ClassVar = {"q_segments": None, "pool_segments": None, "interpret": plgpu.InterpretGPUParams()}
    forward = staticmethod(jax.jit(functools.partial(mosaic.forward, **options)))
    backward = staticmethod(jax.jit(functools.partial(mosaic_vjp.backward, **options)))

    @pytest.mark.parametrize("case", INTERPRETED, ids=str)
    def test_results_are_as_good_as_plain_attention(self, case):
        self.check(case, at_most_plain(case))

    def test_narrow_gradient_pools_are_rounded_once(self):
        self.check_rounding(Case(C=64, M=1, G=1, H=64, S=64, earlier=2, spare=1, dtype="bfloat16"), draws=4)

    def test_nothing_races(self):
        case = Case(C=256, M=1, G=5, H=64, S=64, earlier=5, rows=2, segments=True, dtype="bfloat16")
        options = self.options | {"interpret": plgpu.InterpretGPUParams(detect_races=True)}
        x = inputs(case, seed=3)
        out, lse = jax.jit(functools.partial(mosaic.forward, **options | x.masks))(*x.forward)
        assert not get_races().races_found
        arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], out, lse, x.d_out
        jax.block_until_ready(jax.jit(functools.partial(mosaic_vjp.backward, **options | x.masks))(*arguments))
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
        self.check_rounding(Case(C=256, M=2, G=3, H=128, S=128, earlier=20, rows=2, dtype="bfloat16"), draws=20)

    def test_rows_of_the_same_pages_give_the_bits_of_one_row(self):
        case = Case(C=512, M=2, G=3, H=128, S=128, earlier=5, dtype="bfloat16")
        x = inputs(case, seed=2)
        by_row = dataclasses.replace(x, forward=(*x.forward[:6], jnp.repeat(x.forward[6], 4, axis=0)))
        for one, many in zip(self.run(x)[:7], self.run(by_row)[:7], strict=True):
            assert np.asarray(one).tobytes() == np.asarray(many).tobytes()


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
    with pytest.raises(ValueError, match="go together"):
        paged_attention(*x.forward, q_segments=jnp.zeros(16, jnp.int32))
    with pytest.raises(ValueError, match="window of 0 tokens"):
        paged_attention(*x.forward, window=Window(0, 16, jnp.zeros(k_pool.shape[1], jnp.int32)))
    with pytest.raises(NotImplementedError, match="'mosaic': queries of float32"):
        paged_attention(*x.forward, implementation="mosaic")


def test_what_the_kernels_cannot_take_is_refused_or_said_once(monkeypatch, caplog):
    monkeypatch.setattr(api, "_is_hopper", lambda: True)
    api._log_once.cache_clear()
    x = inputs(Case(C=64, M=1, G=2, H=64, S=64, earlier=1, dtype="bfloat16", window=70), seed=0)
    for _ in range(2):
        paged_attention(*x.forward)
        paged_attention(*x.forward, **x.masks)
    possible, impossible = caplog.records
    assert possible.levelname == impossible.levelname == "WARNING"
    assert "reference; implementation='mosaic' is many times faster" in possible.message
    assert "reference; a sliding window" in impossible.message
    with pytest.raises(NotImplementedError, match="'mosaic': a sliding window"):
        paged_attention(*x.forward, **x.masks, implementation="mosaic")
