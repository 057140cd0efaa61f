"""Paged attention against the formula of its docstring, written without blocks, tables or running sums.

One suite for every implementation. Where there is a Hopper GPU, the kernels run on it: `JAX_PLATFORMS=cuda,cpu pytest
tests/pallas_kernels`.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # there is no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels.paged_attention import api, mosaic, mosaic_vjp, paged_attention, paged_attention_vjp
from oomb_jax.pallas_kernels.paged_attention.cases import GPU, INTERPRETED, SMALL, Case, Inputs, inputs
from oomb_jax.shapes import accumulator
from tests.tolerance import F64_GRADIENT, TIMES_PLAIN

OUTPUTS = "out", "lse", "dq", "dk_new", "dv_new", "dk_pool", "dv_pool"


def definition(q, k_new, v_new, k_pages, v_pages, table, q_segments=None, pool_segments=None):
    """out and lse by one softmax over all keys of a row. k_pages, v_pages [P, M, S, H] are one layer's pages.

    For 16-bit inputs this is plain attention: 16-bit products and weights, a float32 softmax.
    """
    C, N, _ = q.shape
    Q = C // table.shape[0]
    outs, lses = [], []
    for row, ids in enumerate(table):
        ids, queries = ids[ids >= 0], np.arange(row * Q, (row + 1) * Q)
        flat = lambda pages, ids=ids: pages[ids].swapaxes(1, 2).reshape(-1, *k_new.shape[1:])
        k, v = (
            jnp.repeat(jnp.concatenate([flat(pages), own]).astype(q.dtype), N // own.shape[1], axis=1)
            for pages, own in ((k_pages, k_new), (v_pages, v_new))
        )
        mask = np.concatenate([np.ones((Q, len(k) - C), bool), queries[:, None] >= np.arange(C)], axis=1)
        if q_segments is not None and pool_segments is not None:
            of_keys = np.concatenate([np.asarray(pool_segments)[ids].ravel(), np.asarray(q_segments)])
            mask &= np.asarray(q_segments)[queries, None] == of_keys
        scores = jnp.einsum("qnh,unh->nqu", q[queries], k).astype(accumulator(q.dtype)) / np.sqrt(q.shape[2])
        scores = jnp.where(mask[None], scores, -jnp.inf)
        lses.append(jax.nn.logsumexp(scores, axis=2))
        outs.append(jnp.einsum("nqu,unh->qnh", jax.nn.softmax(scores, axis=2).astype(q.dtype), v))
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def by_definition(x, dtype):
    """out, lse, dq, dk_new, dv_new and what this chunk adds to the gradient pools, with inputs of `dtype`."""
    *tensors, layer, table = x.forward
    table = np.asarray(table)
    named = np.unique(table[table >= 0])
    q, k_new, v_new, *pools = (t.astype(dtype) for t in tensors)
    # Only named pages exist for the formula; the others hold NaN.
    pages = [jnp.zeros_like(pool[0]).at[named].set(pool[layer, named]) for pool in pools]
    formula = lambda q, k_new, v_new, k, v: definition(q, k_new, v_new, k, v, table, **x.segments)
    (out, lse), vjp = jax.vjp(formula, q, k_new, v_new, *pages)
    return out, lse, *vjp((x.d_out.astype(dtype), jnp.zeros_like(lse)))


def error(a, b):
    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / max(1e-30, float(np.linalg.norm(b))))


class Suite:
    """Tests of one implementation. Subclasses list their cases."""

    forward = staticmethod(jax.jit(paged_attention))
    backward = staticmethod(jax.jit(paged_attention_vjp))

    def run(self, x):
        """All results, in the order of OUTPUTS, the pools whole."""
        out, lse = self.forward(*x.forward, **x.segments)
        pools = x.dk_pool, x.dv_pool
        return out, lse, *self.backward(*x.forward[:5], *pools, *x.forward[5:], out, lse, x.d_out, **x.segments)

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
        x = inputs(case, seed=1)
        for first, second in zip(self.run(x), self.run(x), strict=True):
            # Bits: NaN of pages that nobody names included.
            assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.parametrize("case", SMALL, ids=str)
class TestReference(Suite):
    def test_results_are_those_of_the_formula(self, case):
        with jax.enable_x64(True):
            case = dataclasses.replace(case, dtype="float64")
            self.check(case, lambda x, exact: [F64_GRADIENT] * len(OUTPUTS))


def at_most_plain(case):
    """At most twice the error that plain attention in the case's dtype makes."""
    return lambda x, exact: [
        TIMES_PLAIN * error(got, want) for got, want in zip(by_definition(x, case.dtype), exact, strict=True)
    ]


class TestMosaicInterpreted(Suite):
    options: ClassVar = {"q_segments": None, "pool_segments": None, "interpret": plgpu.InterpretGPUParams()}
    forward = staticmethod(jax.jit(functools.partial(mosaic.forward, **options)))
    backward = staticmethod(jax.jit(functools.partial(mosaic_vjp.backward, **options)))

    @pytest.mark.parametrize("case", INTERPRETED, ids=str)
    def test_results_are_as_good_as_plain_attention(self, case):
        self.check(case, at_most_plain(case))

    def test_nothing_races(self):
        case = Case(C=256, M=1, G=5, H=64, S=64, earlier=5, rows=2, segments=True, dtype="bfloat16")
        options = self.options | {"interpret": plgpu.InterpretGPUParams(detect_races=True)}
        x = inputs(case, seed=3)
        out, lse = jax.jit(functools.partial(mosaic.forward, **options | x.segments))(*x.forward)
        assert not get_races().races_found
        arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], out, lse, x.d_out
        jax.block_until_ready(jax.jit(functools.partial(mosaic_vjp.backward, **options | x.segments))(*arguments))
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

    def test_rows_of_the_same_pages_give_the_bits_of_one_row(self):
        case = Case(C=512, M=2, G=3, H=128, S=128, earlier=5, dtype="bfloat16")
        x = inputs(case, seed=2)
        by_row = dataclasses.replace(x, forward=(*x.forward[:6], jnp.repeat(x.forward[6], 4, axis=0)))
        for one, many in zip(self.run(x), self.run(by_row), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(many).tobytes()


def test_narrow_gradient_pools_are_rounded_once_to_nearest_or_stochastically():
    case = Case(C=16, M=1, G=2, H=8, S=8, earlier=3)
    x = inputs(case, seed=1)
    out, lse = paged_attention(*x.forward)
    before = x.dk_pool.astype("bfloat16")

    @jax.jit
    def backward(dk_pool, key=None):
        arguments = *x.forward[:5], dk_pool, x.dv_pool.astype(dk_pool.dtype), *x.forward[5:], out, lse, x.d_out
        return paged_attention_vjp(*arguments, rounding_key=key)[3]

    exact = backward(before.astype("float32"))
    nearest = backward(before)
    assert (nearest == exact.astype("bfloat16")).all()
    draws = [backward(before, jax.random.key(i)) for i in range(200)]
    assert (draws[0] != draws[1]).any()
    mean = jnp.stack(draws).astype("float32").mean(axis=0)
    named = x.forward[6][0, :3]
    ulp = 2.0**-7 * jnp.abs(exact[x.forward[5], named]) + 1e-6  # at most
    # A draw has a standard deviation of at most half an ulp, the mean of 200 one of 0.035; six of those.
    assert (jnp.abs(mean - exact)[x.forward[5], named] < 0.21 * ulp).all()


def test_wrong_arguments_are_refused():
    x = inputs(SMALL[1], seed=0)
    q, k_new, v_new, k_pool, v_pool, layer, table = x.forward
    with pytest.raises(ValueError, match="5 query heads over 2"):
        paged_attention(q[:, :5], k_new, v_new, k_pool, v_pool, layer, table)
    with pytest.raises(ValueError, match="each row serves the same number"):
        paged_attention(q, k_new, v_new, k_pool, v_pool, layer, jnp.repeat(table, 5, axis=0))
    with pytest.raises(ValueError, match="go together"):
        paged_attention(*x.forward, q_segments=jnp.zeros(16, jnp.int32))
    with pytest.raises(NotImplementedError, match="'mosaic': queries of float32"):
        paged_attention(*x.forward, implementation="mosaic")


def test_a_faster_implementation_is_pointed_out_once(monkeypatch, caplog):
    monkeypatch.setattr(api, "_is_hopper", lambda: True)
    monkeypatch.setattr(api, "unsupported", lambda *_: None)
    api._log_once.cache_clear()
    x = inputs(SMALL[1], seed=0)
    for _ in range(2):
        paged_attention(*x.forward)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "implementation='mosaic' is many times faster" in record.message
