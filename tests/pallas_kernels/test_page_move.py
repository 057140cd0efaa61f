"""The page movers against loops in numpy: the reference everywhere, the kernels on a GPU and in Triton's interpreter.

On a GPU: `JAX_PLATFORMS=cuda,cpu pytest tests/pallas_kernels/test_page_move.py`. The interpreter needs jax-triton,
compiling also the CUDA compiler.
"""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from oomb_jax.pallas_kernels import rounding, triton_call
from oomb_jax.pallas_kernels.page_move import add_pages, api, fetch_pages, on_copy_stream, quantise, store_pages
from oomb_jax.pallas_kernels.page_move.config import AHEAD, WARPS
from oomb_jax.pallas_kernels.paged_attention import mosaic_vjp, paged_attention, paged_attention_vjp
from oomb_jax.pallas_kernels.paged_attention.cases import Case as AttentionCase
from oomb_jax.pallas_kernels.paged_attention.cases import inputs
from oomb_jax.selection import stage
from oomb_jax.shapes import iota
from tests.pallas_kernels.assemble import needs_assembler

AMPERE = jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 8
FLOAT8 = ml_dtypes.float8_e4m3fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A pool, and U entries of which about a third have no page."""

    P: int = 9
    M: int
    S: int
    H: int
    U: int
    dtype: str
    L: int = 3
    programs: int = 3


CASES = (
    Case(M=2, S=8, H=16, U=7, dtype="bfloat16"),
    Case(M=1, S=24, H=20, U=9, dtype="bfloat16", programs=16),
    Case(M=3, S=8, H=12, U=5, dtype="float32"),
    Case(M=2, S=16, H=32, U=12, dtype="float8_e4m3fn"),
    Case(M=3, S=4, H=12, U=6, dtype="float8_e4m3fn", programs=1),
    Case(M=2, S=8, H=24, U=4, dtype="float16"),
)
LARGE = (
    Case(P=300, M=4, S=128, H=128, U=200, dtype="bfloat16", programs=16),
    Case(P=70, M=8, S=64, H=64, U=64, dtype="float32", programs=8),
    Case(P=300, M=4, S=128, H=128, U=1500, dtype="float8_e4m3fn", programs=32),
    Case(P=40, M=2, S=128, H=96, U=33, dtype="bfloat16", programs=16),
)


def check(case: Case, implementation, memory_kind=None):
    """Every mover on one case, bit for bit. What must not be read is NaN."""
    rng = np.random.default_rng(case.U * case.P)
    dtype = jnp.dtype(case.dtype)
    shape = case.L, case.P, case.M, case.S, case.H
    pool = draw(rng, shape, dtype)
    pages = np.full(case.U, -1, np.int32)
    named = rng.choice(case.U, size=min(case.P - 1, case.U - case.U // 3), replace=False)
    pages[named] = rng.choice(case.P, size=len(named), replace=False)
    layer = int(rng.integers(case.L))
    values = draw(rng, (case.U, *shape[2:]), dtype)
    sharding = on(memory_kind)

    def run(mover, pool, *arguments, donate=True, **more):
        function = functools.partial(mover, implementation=implementation, programs=case.programs, **more)
        jitted = jax.jit(function, donate_argnums=0, out_shardings=sharding) if donate else jax.jit(function)
        return np.asarray(jitted(jax.device_put(pool, sharding), jnp.int32(layer), *map(jnp.asarray, arguments)))

    def same(pool, expected):
        assert pool.dtype == expected.dtype
        assert pool.tobytes() == expected.tobytes()

    fetched = run(fetch_pages, pool, pages, donate=False)
    same(fetched[named], pool[layer, pages[named]])
    if memory_kind is None:  # where the result begins as NaN
        assert np.isnan(fetched[pages < 0].astype(np.float32)).all()
    at_hand, entries = draw(rng, (case.U + 2, *shape[2:]), dtype), rng.permutation(case.U).astype(np.int32)
    near = rng.random(case.U) < 0.5
    at_hand_of = lambda *arrays: functools.partial(fetch_near, *map(jnp.asarray, arrays))
    fetched = run(at_hand_of(at_hand, np.where(near, entries, -1)), pool, pages, donate=False)
    for u in named:
        same(fetched[u], at_hand[entries[u]] if near[u] else pool[layer, pages[u]])

    expected = pool.copy()
    for u in named:
        expected[layer, pages[u]] = values[u]
    same(run(store_pages, pool, pages, values), expected)

    if dtype == FLOAT8:
        scales = 2.0 ** rng.integers(-40, 40, size=shape[:3]).astype(np.float32)
        exact = pool.astype(np.float32) * scales[..., None, None]
        for wide in "bfloat16", "float32":
            fetched = run(fetch_pages, pool, pages, donate=False, scales=jnp.asarray(scales), dtype=wide)
            assert fetched.dtype == wide
            np.testing.assert_array_equal(fetched[named].astype(np.float32), exact[layer, pages[named]])
        return
    fetched = run(fetch_pages, pool, pages, donate=False, dtype="float32")
    same(fetched[named], pool[layer, pages[named]].astype(np.float32))

    wide = rng.normal(size=values.shape).astype(np.float32) * 2.0 ** rng.integers(-9, 9, size=values.shape)
    limits = np.finfo(np.float32)
    wide[named[0], 0, 0, :4] = np.inf, -np.inf, limits.max, limits.min
    fresh = rng.random(case.U) < 0.4
    pool[:, pages[fresh & (pages >= 0)]] = np.nan
    others = rng.permutation(case.U).astype(np.int32)
    for key, word, names in (
        (None, 0, pages), (jax.random.key(3), 0, pages), (jax.random.key(3), 1, pages), (jax.random.key(3), 0, others)
    ):  # fmt: skip
        expected = pool.copy()
        for u in named:
            for head in range(case.M):
                at = layer, pages[u], head
                total = wide[u, head] + (0 if fresh[u] else pool[at].astype(np.float32))
                if key is not None and dtype == jnp.bfloat16:
                    total = as_the_attention_kernel_rounds(total, key, word, names[u] * case.M + head)
                with np.errstate(over="ignore"):
                    expected[at] = total.astype(dtype)
        more = () if names is pages else (names,)
        same(run(add_pages, pool, pages, wide, fresh, *more, rounding_key=key, word=word), expected)


def fetch_near(at_hand, entries, pool, layer, pages, **options):
    return fetch_pages(pool, layer, pages, at_hand=(at_hand, entries), **options)


def on(memory_kind):
    """The device's memory of a kind; None leaves it to JAX."""
    return memory_kind and jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory_kind)


def draw(rng, shape, dtype):
    if dtype == FLOAT8:  # all of its numbers
        return rng.integers(256, size=shape, dtype=np.uint8).view(FLOAT8)
    return rng.normal(size=shape).astype(dtype)


def as_the_attention_kernel_rounds(total, key, word, tile):
    words = rounding.words(key)
    element = jnp.arange(total.size, dtype=jnp.int32).reshape(total.shape)
    bits = rounding.random_bits(words[word], jnp.int32(tile), element)
    return np.asarray(rounding.stochastic_round(jnp.asarray(total), bits))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_moves_what_a_loop_moves(case):
    check(case, "reference")


@pytest.mark.skipif(not AMPERE, reason="needs an NVIDIA GPU of compute capability 8.0 or higher")
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_kernels_move_what_a_loop_moves(case, memory_kind):
    check(case, "triton", memory_kind)


def check_staged_gradients(backward, case, implementation, memory_kind=None):
    """Gradients of staged pages, added to a pool, are the bits that the attention kernel leaves in that pool."""
    x = inputs(case, seed=1)
    q, k_new, v_new, k_pool, v_pool, layer, table = x.forward
    out, lse = jax.jit(functools.partial(paged_attention, implementation="reference"))(*x.forward)
    pools, key = (x.dk_pool.astype(jnp.bfloat16), x.dv_pool.astype(jnp.bfloat16)), jax.random.key(5)
    saved = out, lse, x.d_out
    direct = backward(q, k_new, v_new, k_pool, v_pool, *pools, layer, table, *saved, rounding_key=key)[3:]

    staging = stage(table, k_pool.shape[1])
    fetch = jax.jit(functools.partial(fetch_pages, implementation=implementation))
    k, v = (fetch(pool, layer, staging.pages)[None] for pool in (k_pool, v_pool))
    zeros = jnp.zeros(k.shape, jnp.float32)
    staged = backward(q, k_new, v_new, k, v, zeros, zeros, jnp.int32(0), staging.table, *saved)[3:]
    for word in range(2):
        add = functools.partial(add_pages, implementation=implementation, rounding_key=key, word=word)
        jitted = jax.jit(add, donate_argnums=0, out_shardings=on(memory_kind))
        pool = jax.device_put(pools[word], on(memory_kind))
        fresh = jnp.zeros(len(staging.pages), bool)
        result = jitted(pool, layer, staging.pages, staged[word][0], fresh)
        assert np.asarray(result).tobytes() == np.asarray(direct[word]).tobytes()


def test_staged_gradients_are_rounded_as_in_the_attention_kernel():
    options = {"q_segments": None, "pool_segments": None, "interpret": plgpu.InterpretGPUParams()}
    backward = jax.jit(functools.partial(mosaic_vjp.backward, **options))
    case = AttentionCase(C=128, M=2, G=1, H=64, S=64, earlier=2, rows=2, spare=2, dtype="bfloat16")
    check_staged_gradients(backward, case, "reference")


HOPPER = AMPERE and jax.devices()[0].compute_capability.startswith("9.")


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_pools_on_the_host_get_the_bits_of_pools_on_the_device(memory_kind):
    backward = jax.jit(functools.partial(paged_attention_vjp, implementation="mosaic"))
    case = AttentionCase(C=512, M=2, G=3, H=128, S=128, earlier=20, rows=4, dtype="bfloat16")
    check_staged_gradients(backward, case, "triton", memory_kind)


def offline(*arguments, **environment):
    """What `tests.pallas_kernels.page_move_offline` prints."""
    command = [sys.executable, "-m", "tests.pallas_kernels.page_move_offline", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_triton = pytest.mark.skipif(triton_call.missing() is not None, reason="needs jax-triton")


@needs_triton
def test_interpreted_kernels_move_what_a_loop_moves():
    assert f"cases: {2 * len(CASES)}" in offline("interpret", TRITON_INTERPRET="1")


@needs_triton
@needs_assembler
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_to_wide_accesses_without_spills(capability, tmp_path):
    lines = offline("compile", capability, JAX_TRITON_DUMP_DIR=str(tmp_path)).splitlines()
    kernels = [line.split()[1:] for line in lines if line.startswith("kernel")]
    assert len(kernels) == 14
    for name, spilled, shared, copies, *accesses in kernels:
        assert spilled == "0", name
        # Every block is asked for ahead, and what is on its way has a place on every GPU.
        each_block, rest = divmod(int(copies), AHEAD + 1)
        assert each_block > 0, name
        assert rest == 0, name
        assert AHEAD * each_block * 16 * 32 * WARPS <= int(shared) <= 99 * 1024, name
        # Single words are ids, counts and scales.
        assert sorted(accesses) == ["ld.global.b32", "ld.global.v4.b32", "st.global.v4.b32"], name


def test_pools_are_updated_in_place_in_a_scan_over_layers():
    case = Case(L=4, P=32, M=2, S=8, H=16, U=3, dtype="float32")
    rng = np.random.default_rng(0)
    pool = draw(rng, (case.L, case.P, case.M, case.S, case.H), jnp.dtype(case.dtype))
    pages = np.stack([rng.choice(case.P, case.U, replace=False) for _ in range(case.L)]).astype(np.int32)
    pages[0, 1] = -1

    def step(pool, pages):
        def body(pool, x):
            l, pages = x
            fetched = on_copy_stream(fetch_pages)(pool, l, pages)
            pool = on_copy_stream(add_pages)(pool, l, pages, 2 * fetched, jnp.zeros(case.U, bool))
            return pool, fetched

        return lax.scan(body, pool, (iota(case.L), pages))

    compiled = jax.jit(step, donate_argnums=0).lower(pool, pages).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 4
    expected = pool.copy()
    for l, u in np.argwhere(pages >= 0):
        np.multiply(pool[l, pages[l, u]], 3, out=expected[l, pages[l, u]])
    np.testing.assert_array_equal(compiled(jnp.asarray(pool), pages)[0], expected)


def test_quantised_pages_are_the_nearest_numbers_at_the_smallest_scale():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(6, 3, 16, 8)) * 2.0 ** rng.integers(-60, 60, size=(6, 3, 1, 1))
    values = values.astype(ml_dtypes.bfloat16)
    values[0, 0, 2, 3] = 500 * np.abs(values[0, 0]).max()  # the others vanish or become subnormal
    values[1, 0], values[1, 0, 4, 0] = 3, -448
    values[1, 1], values[1, 1, 4, 0] = 3, 450
    values[1, 2] = 0
    values[2, 0] = 1e-36  # so small that widened numbers would be subnormal at the smallest scale
    tokens = np.array([16, 16, 16, 5, 1, 0], np.int32)
    exists = (np.arange(16) < tokens[:, None])[:, None, :, None]
    garbage = np.where(exists, values, np.nan).astype(values.dtype)
    pages, scales = map(np.asarray, jax.jit(quantise)(garbage, tokens))

    values = np.where(exists, values.astype(np.float32), 0)
    largest = np.abs(values).max(axis=(2, 3))
    for (page, head), scale in np.ndenumerate(scales):
        if largest[page, head] < 2.0**-100:
            assert scale == (1 if largest[page, head] == 0 else 2.0**-117)
            continue
        assert np.frexp(scale)[0] == 0.5
        assert largest[page, head] / scale <= 448 < largest[page, head] / (scale / 2)
    assert scales[1, 0] == 1
    assert scales[1, 1] == 2
    expected = (values / scales[..., None, None]).astype(FLOAT8)
    assert pages.tobytes() == expected.tobytes()

    exact = expected.astype(np.float32) * scales[..., None, None]
    pool, order = jnp.asarray(pages)[None], iota(6)[::-1]
    widened = fetch_pages(pool, 0, order, scales=jnp.asarray(scales)[None], implementation="reference")
    assert widened.dtype == jnp.bfloat16
    np.testing.assert_array_equal(widened.astype(jnp.float32), exact[::-1])


def test_what_is_not_finite_stays_so_in_float8():
    values = np.ones((2, 1, 8, 8), np.float32)
    values[0, 0, 3, 2], values[1, 0, 5, 1] = np.nan, np.inf
    pages, _ = quantise(jnp.asarray(values), jnp.full(2, 8, jnp.int32))
    assert not np.isfinite(np.asarray(pages, np.float32)[[0, 1], 0, [3, 5], [2, 1]]).any()


POOL = jnp.zeros((2, 4, 2, 8, 16), jnp.bfloat16)
PAGES = jnp.asarray([1, -1], jnp.int32)
VALUES = jnp.ones((2, 2, 8, 16), jnp.float32)


def test_dtypes_that_do_not_fit_are_refused():
    float8 = POOL.astype(FLOAT8)
    with pytest.raises(ValueError, match="float8_e4m3fn pages as bfloat16 without scales"):
        fetch_pages(float8, 0, PAGES, dtype="bfloat16")
    with pytest.raises(ValueError, match="scales for bfloat16 pages as bfloat16"):
        fetch_pages(POOL, 0, PAGES, scales=jnp.ones((2, 4, 2)))
    with pytest.raises(ValueError, match="scales for float8_e4m3fn pages as float8_e4m3fn"):
        fetch_pages(float8, 0, PAGES, scales=jnp.ones((2, 4, 2)), dtype=FLOAT8)
    with pytest.raises(ValueError, match="bfloat16 pages as float16: fetching only widens"):
        fetch_pages(POOL, 0, PAGES, dtype="float16")
    for at_hand, scales in (VALUES, None), (float8[0], jnp.ones((2, 4, 2))):
        with pytest.raises(ValueError, match=r"pages at hand, .* to fetch: one dtype, no scales"):
            fetch_pages(POOL if scales is None else float8, 0, PAGES, at_hand=(at_hand, PAGES), scales=scales)
    with pytest.raises(ValueError, match="quantise"):
        store_pages(float8, 0, PAGES, VALUES)
    with pytest.raises(ValueError, match="the same dtype or a wider one"):
        store_pages(POOL, 0, PAGES, VALUES.astype(jnp.float16))
    with pytest.raises(ValueError, match="a pool of float8_e4m3fn: pages are added to bfloat16 or wider"):
        add_pages(float8, 0, PAGES, VALUES, PAGES < 0)
    with pytest.raises(ValueError, match="programs=0"):
        fetch_pages(POOL, 0, PAGES, programs=0)


def test_values_are_rounded_to_a_narrower_pool():
    stored = store_pages(POOL, 1, PAGES, VALUES * jnp.float32(1 + 2**-8 + 2**-12), implementation="reference")
    assert (stored[1, 1] == jnp.bfloat16(1 + 2**-7)).all()


def test_a_pool_in_host_memory_needs_the_kernels(monkeypatch):
    host = jax.device_put(POOL, on("pinned_host"))
    with pytest.raises(NotImplementedError, match="fetch_pages with a pool in host memory: only"):
        fetch_pages(host, 0, PAGES, implementation="reference")
    if not AMPERE:
        with pytest.raises(NotImplementedError, match="; here: no NVIDIA GPU"):
            jax.jit(lambda pool: add_pages(pool, 0, PAGES, VALUES, PAGES < 0))(host)
        with pytest.raises(NotImplementedError, match="'triton': no NVIDIA GPU of compute capability"):
            fetch_pages(POOL, 0, PAGES, implementation="triton")
    with pytest.raises(ValueError, match="has no other result"):
        triton_call.triton_call(None, in_place=(host, host), grid=(1,))


def test_the_reference_stands_in_where_triton_is_missing_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(api, "device_capability", lambda: 90)
    monkeypatch.setattr(api, "unsupported_triton", lambda *_: "the package jax_triton is not installed")
    api._say_once.cache_clear()
    for _ in range(2):
        fetch_pages(POOL, 0, PAGES)
    assert [record.getMessage() for record in caplog.records] == [
        "fetch_pages: reference, because: the package jax_triton is not installed"
    ]
