"""The product kernel against float64, in Pallas's interpreter and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # there is no public name
from jax.experimental.pallas import mosaic_gpu as plgpu

import oomb_jax
from oomb_jax.chunked import _remat
from oomb_jax.pallas_kernels.matmul import api, config, matmul, products
from oomb_jax.pallas_kernels.matmul.config import TILES, tiles
from oomb_jax.pallas_kernels.matmul.mosaic import product

HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability.startswith("9.")
INTERPRET = plgpu.InterpretGPUParams()


def operands(M, K, N, dtype="bfloat16", *, transpose_a=False, transpose_b=False, seed=0):
    """Random matrices, stored as they are or as their transposes."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    return jnp.asarray(a.T if transpose_a else a, dtype), jnp.asarray(b.T if transpose_b else b, dtype)


def check(got, a, b, **transposed):
    """Rounded once from float32 sums: at most half a unit of the last place off, and what the sums have lost."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    a, b = a.T if transposed.get("transpose_a") else a, b.T if transposed.get("transpose_b") else b
    exact, size = a @ b, np.abs(a) @ np.abs(b)
    unit = float(jnp.finfo(got.dtype).eps) / 2
    assert np.isfinite(np.asarray(got, np.float64)).all()
    assert (np.abs(np.asarray(got, np.float64) - exact) <= unit * np.abs(exact) * (1 + 1e-3) + 2**-20 * size).all()


def interpreted(a, b, **options):
    options = {"programs": 3, "interpret": INTERPRET} | options
    return jax.block_until_ready(jax.jit(functools.partial(product, **options))(a, b))


@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_b": True}], ids=["nn", "tn", "nt"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.width}")
def test_interpreted_products_of_every_tile(tile, transposed, monkeypatch):
    monkeypatch.setattr(config, "TILES", (tile,))
    a, b = operands(tile.rows + 64, 192, tile.width + 64, **transposed)
    check(interpreted(a, b, **transposed), a, b, **transposed)


def test_interpreted_products_of_random_shapes():
    rng = np.random.default_rng(1)
    for seed in range(6):
        M, K, N = (64 * int(rng.integers(1, 8)) for _ in range(3))
        transposed = {name: bool(rng.integers(2)) for name in ("transpose_a", "transpose_b")}
        a, b = operands(M, K, N, ["bfloat16", "float16"][seed % 2], seed=seed, **transposed)
        check(interpreted(a, b, programs=int(rng.integers(1, 6)), **transposed), a, b, **transposed)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows}x{tile.width}")
def test_nothing_races(tile, monkeypatch):
    monkeypatch.setattr(config, "TILES", (tile,))
    # Three tiles after each other, of each no more inputs than one stage. Of eight runs some find it where a buffer is
    # written too early.
    a, b = operands(3 * tile.rows, 64, tile.width)
    for _ in range(8):
        interpreted(a, b, programs=1, interpret=plgpu.InterpretGPUParams(detect_races=True))
        assert not get_races().races_found


def test_gradients_are_products_too():
    x, weight = operands(136, 192, 320)
    dy = operands(136, 320, 8, seed=5)[0]

    def gradients(x, weight):
        y, pull = jax.vjp(matmul, x, weight)
        return y, *pull(dy)

    with products("mosaic", interpret=INTERPRET):
        y, dx, dw = gradients(x, weight)
    check(y, x, weight)
    check(dx, dy, weight, transpose_b=True)
    check(dw, x, dy, transpose_a=True)
    for got, want in zip((y, dx, dw), gradients(x, weight), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape


def test_the_kernel_runs_where_it_is_asked_for():
    x, weight = operands(64, 64, 64)
    kernels = lambda x, weight: str(jax.make_jaxpr(matmul)(x, weight)).count("custom_vjp_call")
    with products("mosaic", interpret=INTERPRET):
        assert kernels(x, weight) == 1
        assert kernels(x.astype(jnp.float32), weight.astype(jnp.float32)) == 0
        assert kernels(x[:, :-8], weight[:-8]) == 0
        assert kernels(x[:-4], weight) == 0
        with products("reference", spare=4, interpret=INTERPRET):
            assert kernels(x, weight) == 0
        assert kernels(x, weight) == 1
    with products(None, spare=4, interpret=INTERPRET):
        assert kernels(x, weight) == 1
    with products(None, interpret=INTERPRET):
        assert kernels(x, weight) == 0
    with products(None, spare=100 if HOPPER else 4):
        assert kernels(x, weight) == 0
    assert kernels(x, weight) == 0


@pytest.mark.skipif(HOPPER, reason="there it runs")
def test_a_named_kernel_that_cannot_run_is_refused():
    with products("mosaic"), pytest.raises(NotImplementedError, match="matmul='mosaic': no Hopper GPU"):
        matmul(*operands(64, 64, 64))


def test_checkpoints_can_keep_results(monkeypatch):
    # The interpreter has effects, which `jax.checkpoint` does not take; a product that it knows would be kept anyway.
    def product(a, b, setting, transpose_a=False, transpose_b=False):
        a, b = a.T if transpose_a else a, b.T if transpose_b else b
        return jax.lax.reduce_max(a[:, :, None] * b[None], (1,))

    monkeypatch.setattr(api, "_product", product)
    x, weight = operands(64, 64, 64)
    f = lambda x: jnp.sin(matmul(jnp.cos(x), weight)).sum()

    def computed(remat):
        with products("mosaic", interpret=INTERPRET):
            kept = _remat(oomb_jax.Config(remat=remat))(f)
            return str(jax.make_jaxpr(jax.grad(kept))(x)).count("reduce_max[")

    assert computed("dots") == 3  # forward, and two gradients
    assert computed("full") == 4


def test_tiles_leave_few_programs_idle():
    shape = lambda *arguments: (tiles(*arguments).rows, tiles(*arguments).width)
    assert shape(4096, 18944, 128) == (256, 128)
    assert shape(4096, 3584, 128) == (128, 320)  # 3 rounds of 384 tiles; 448 of 256 x 128 are four
    assert shape(4096, 512, 128) == (128, 128)
    assert [tile.stages for tile in TILES] == [4, 3, 4, 4]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_b": True}], ids=["nn", "tn", "nt"])
def test_products_of_a_gpu(transposed):
    for M, K, N in ((4096, 3584, 512), (64, 192, 1024), (192, 64, 64), (1088, 640, 3584), (4096, 1024, 18944)):
        a, b = operands(M, K, N, **transposed)
        got = jax.jit(functools.partial(product, programs=128, **transposed))(a, b)
        check(got, a, b, **transposed)
        want = jax.jit(functools.partial(api.reference, **transposed))(a, b)
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2**-7, atol=2**-7)
        for programs in (3, 132):
            again = jax.jit(functools.partial(product, programs=programs, **transposed))(a, b)
            assert np.asarray(again).tobytes() == np.asarray(got).tobytes()
