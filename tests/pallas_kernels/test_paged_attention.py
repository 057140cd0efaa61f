"""Paged attention against the formula of its docstring, written without blocks, tables or running sums."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.pallas_kernels.paged_attention import paged_attention, paged_attention_vjp
from oomb_jax.pallas_kernels.paged_attention.cases import SMALL, Case, inputs
from tests.tolerance import F64_GRADIENT


def definition(q, k_new, v_new, k_pages, v_pages, table, q_segments=None, pool_segments=None):
    """out and lse by one softmax over all keys of a row. k_pages, v_pages [P, M, S, H] are one layer's pages."""
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
        scores = jnp.einsum("qnh,unh->nqu", q[queries], k) / np.sqrt(q.shape[2])
        scores = jnp.where(mask[None], scores, -jnp.inf)
        lses.append(jax.nn.logsumexp(scores, axis=2))
        outs.append(jnp.einsum("nqu,unh->qnh", jax.nn.softmax(scores, axis=2), v))
    return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)


def relative(a, b):
    return float(jnp.linalg.norm((a - b).ravel()) / max(1e-30, float(jnp.linalg.norm(b.ravel()))))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_forward_and_backward_are_those_of_the_formula(case):
    with jax.enable_x64(True):
        x = inputs(dataclasses.replace(case, dtype="float64"), seed=0)
        q, k_new, v_new, k_pool, v_pool, layer, table = x.forward
        named = sorted({int(p) for p in np.asarray(table).ravel() if p >= 0})

        # Only named pages exist for the formula; the others hold NaN.
        def pages(pool):
            return jnp.zeros_like(pool[0]).at[jnp.array(named, jnp.int32)].set(pool[layer, jnp.array(named, jnp.int32)])

        def formula(q, k_new, v_new, k_pages, v_pages):
            return definition(q, k_new, v_new, k_pages, v_pages, np.asarray(table), **x.segments)

        (out, lse), vjp = jax.vjp(formula, q, k_new, v_new, pages(k_pool), pages(v_pool))
        expected = vjp((x.d_out, jnp.zeros_like(lse)))

        actual_out, actual_lse = jax.jit(paged_attention)(*x.forward, **x.segments)
        assert relative(actual_out, out) < F64_GRADIENT
        assert relative(actual_lse, lse) < F64_GRADIENT

        gradient = jax.jit(paged_attention_vjp)(
            *x.forward[:5], x.dk_pool, x.dv_pool, layer, table, out, lse, x.d_out, **x.segments
        )
        for got, want in zip(gradient[:3], expected[:3], strict=True):
            assert relative(got, want) < F64_GRADIENT
        for got, before, want in zip(gradient[3:], (x.dk_pool, x.dv_pool), expected[3:], strict=True):
            # Added to the pages of this layer, and nothing else touched.
            assert relative(got, before.at[layer].add(want)) < F64_GRADIENT
            untouched = [p for p in range(want.shape[0]) if p not in named]
            assert (got[:, jnp.array(untouched)] == before[:, jnp.array(untouched)]).all()


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
    with pytest.raises(NotImplementedError, match="'mosaic'"):
        paged_attention(*x.forward, implementation="mosaic")
