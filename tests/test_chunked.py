"""Chunk-recurrent gradients against full attention and automatic differentiation."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import oomb_jax
from oomb_jax.chunk import STOCHASTIC_CHUNKS
from oomb_jax.config import Remat
from oomb_jax.sequence import check_batch, segment_positions
from tests.gradients import gradient_error, poison, random_batch, random_model
from tests.tolerance import F32_GRADIENT, F64_GRADIENT

REMATS: tuple[Remat, ...] = ("none", "dots", "full")

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
yardstick = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")


@pytest.fixture
def untyped():
    """Calls as users make them, without the suite's type checks: these would refuse a wrong argument first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def random_config(rng, **settings):
    page = int(rng.choice([8, 16]))
    remat = REMATS[int(rng.integers(3))]
    hbm_layers = [None, None, 0, 1][int(rng.integers(4))]  # every model has at least one
    chunk = page * int(rng.integers(1, 6))
    return oomb_jax.Config(page=page, chunk=chunk, remat=remat, hbm_layers=hbm_layers, **settings)


def random_problem(seed, dtype):
    """A model and a batch. The seeds cover T = 1, groups of 1, 3 and 7 query heads, tied heads, batches, segments."""
    rng = np.random.default_rng(seed)
    group, kv_heads = [(1, 2), (3, 1), (7, 2)][seed % 3]
    model = random_model(rng, layers=1 + seed % 3, group=group, kv_heads=kv_heads, tied=seed % 4 < 2, dtype=dtype)
    T = 1 if seed == 0 else int(rng.integers(2, 260))
    shape = [(T,), (1, T), (3, T)][int(rng.integers(3))]
    return rng, model, random_batch(rng, shape, segments=seed % 2 == 1)


@pytest.mark.parametrize("seed", range(9))
def test_gradients_equal_full_attention_in_float64(seed):
    with jax.enable_x64(True):
        rng, model, batch = random_problem(seed, jnp.float64)
        expected_loss, expected, _ = yardstick(
            model, None, batch.tokens, batch.labels, oomb_jax.Config(), batch.segments
        )
        for config in [random_config(rng) for _ in range(4)]:
            pools = poison(oomb_jax.create_pools(model, batch.tokens.shape[-1] + int(rng.integers(100)), config))
            loss, grads, _ = step(model, pools, batch.tokens, batch.labels, config, batch.segments)
            assert loss.dtype == jnp.float64
            assert jax.tree.structure(grads) == jax.tree.structure(model)
            assert abs(float(loss - expected_loss)) <= F64_GRADIENT * max(1.0, float(expected_loss)), config
            error, name = gradient_error(grads, expected)
            assert error <= F64_GRADIENT, (config, name)


@pytest.mark.parametrize("seed", [1, 5])
def test_gradients_equal_full_attention_in_float32(seed):
    rng, model, batch = random_problem(seed, jnp.float32)
    config = random_config(rng)
    pools = poison(oomb_jax.create_pools(model, batch.tokens.shape[-1], config))
    loss, grads, _ = step(model, pools, batch.tokens, batch.labels, config, batch.segments)
    expected_loss, expected, _ = yardstick(model, None, batch.tokens, batch.labels, config, batch.segments)
    assert abs(float(loss - expected_loss)) <= F32_GRADIENT * float(expected_loss)
    error, name = gradient_error(grads, expected)
    assert error <= F32_GRADIENT, name


def test_two_calls_give_the_same_bits_whatever_the_pools_held():
    rng, model, batch = random_problem(4, jnp.bfloat16)
    config = random_config(rng)
    arguments = batch.tokens, batch.labels, config, batch.segments
    first, grads, pools = step(model, oomb_jax.create_pools(model, batch.tokens.shape[-1], config), *arguments)
    for used in (pools, poison(oomb_jax.create_pools(model, batch.tokens.shape[-1], config))):
        loss, again, _ = step(model, used, *arguments)
        assert loss == first
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), again, grads)))


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_ids_of_other_integer_types_give_the_same_bits(dtype, untyped):
    rng = np.random.default_rng(0)
    model = oomb_jax.models.create("tiny", key=jax.random.key(0), dtype=jnp.float32)
    tokens, labels = (jnp.asarray(rng.integers(250, 256, 20), jnp.int32) for _ in range(2))
    config = oomb_jax.Config(page=8, chunk=16)
    (_, expected, _), (_, grads, _) = (
        step(model, oomb_jax.create_pools(model, 20, config), tokens.astype(t), labels.astype(t), config)
        for t in ("int32", dtype)
    )
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), grads, expected)))


def test_no_valid_label_gives_loss_and_gradients_zero():
    rng = np.random.default_rng(0)
    model = random_model(rng, dtype=jnp.float32)
    batch = random_batch(rng, (2, 40), segments=False, ignored=1.0)
    config = oomb_jax.Config(page=8, chunk=16)
    loss, grads, _ = step(model, oomb_jax.create_pools(model, 40, config), batch.tokens, batch.labels, config)
    assert loss == 0
    assert all(bool((g == 0).all()) for g in jax.tree.leaves(grads))


def test_dtypes_of_pools_and_gradients_are_as_asked():
    rng = np.random.default_rng(0)
    # Small scores: with large ones a rounded key can turn the whole softmax.
    model = jax.tree.map(lambda x: 0.3 * x, random_model(rng, dtype=jnp.float32))
    batch = random_batch(rng, (100,), segments=False)
    exact = oomb_jax.Config(page=8, chunk=24)
    narrow = dataclasses.replace(exact, kv_dtype="bfloat16", kv_grad_dtype="bfloat16", grad_dtype="bfloat16")
    pools = oomb_jax.create_pools(model, 100, narrow)
    assert {str(x.dtype) for x in jax.tree.leaves(pools)} == {"bfloat16"}
    _, grads, _ = step(model, pools, batch.tokens, batch.labels, narrow)
    assert {str(x.dtype) for x in jax.tree.leaves(grads)} == {"bfloat16"}
    _, expected, _ = step(model, oomb_jax.create_pools(model, 100, exact), batch.tokens, batch.labels, exact)
    error, name = gradient_error(grads, expected)
    # Rounding the pools must change the result, and not by more than a few roundings to 8 bits.
    assert 1e-4 < error < 0.02, name


@pytest.mark.parametrize(("pool_dtype", "least", "most"), [("float32", 1e-9, 1e-6), ("bfloat16", 1e-4, 0.02)])
def test_narrow_gradient_pools_of_many_chunks_in_float64(pool_dtype, least, most):
    """Above STOCHASTIC_CHUNKS bfloat16 rounds at random, float32 to nearest."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        model = jax.tree.map(lambda x: 0.3 * x, random_model(rng, dtype=jnp.float64))
        batch = random_batch(rng, (8 * STOCHASTIC_CHUNKS + 1,), segments=False)
        config = oomb_jax.Config(page=8, chunk=8, kv_grad_dtype=pool_dtype)
        pools = oomb_jax.create_pools(model, len(batch.tokens), config)
        _, grads, _ = step(model, pools, batch.tokens, batch.labels, config)
        _, expected, _ = yardstick(model, None, batch.tokens, batch.labels, config)
    error, name = gradient_error(grads, expected)
    assert least < error < most, name


def test_bfloat16_sums_of_1024_chunks(monkeypatch):
    """Every chunk attends to the first page and wants the same token, so its values have 1,024 similar shares added."""
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda x: 0.3 * x, random_model(rng, layers=1, dtype=jnp.float32))
    tokens = random_batch(rng, (8 * 1025,), segments=False).tokens
    wide = oomb_jax.Config(page=8, chunk=8, attention=oomb_jax.TopK(pages=1, first_pages=1))
    narrow = dataclasses.replace(wide, kv_grad_dtype="bfloat16")

    def gradient_of_first_values(config):
        run = jax.jit(lambda pools: oomb_jax.value_and_grad(model, pools, tokens, jnp.full_like(tokens, 3), config))
        pools = run(oomb_jax.create_pools(model, len(tokens), config))[2]
        return pools.hbm.dv[0, 0].astype(jnp.float32)

    exact, random = gradient_of_first_values(wide), gradient_of_first_values(narrow)
    monkeypatch.setattr("oomb_jax.chunk.STOCHASTIC_CHUNKS", 2048)
    nearest = gradient_of_first_values(narrow)
    assert gradient_error(random, exact)[0] < 0.06
    assert abs(float(jnp.mean(random / exact)) - 1) < 0.02
    assert gradient_error(nearest, exact)[0] > 0.2  # stalls where a share is half a unit in the last place


def test_many_chunks_round_stochastically(monkeypatch):
    rng = np.random.default_rng(0)
    model = random_model(rng, layers=1, dtype=jnp.float32)
    batch = random_batch(rng, (40,), segments=False)
    config = oomb_jax.Config(page=8, chunk=8, kv_grad_dtype="bfloat16")

    def grads(most):
        monkeypatch.setattr("oomb_jax.chunk.STOCHASTIC_CHUNKS", most)
        pools = oomb_jax.create_pools(model, 40, config)
        return oomb_jax.value_and_grad(model, pools, batch.tokens, batch.labels, config)[1]

    # Five chunks: above the first limit, not above the second.
    assert gradient_error(grads(4), grads(5))[0] > 0


def test_positions_restart_with_each_segment():
    # Rotary scores depend on differences of positions alone, so no gradient of a Qwen2 tells.
    segments = jnp.asarray([0, 0, 3, 3, 3, 4], jnp.int32)
    np.testing.assert_array_equal(segment_positions(segments), [0, 1, 0, 1, 2, 0])


def test_token_losses_are_those_of_full_attention():
    with jax.enable_x64(True):
        rng, model, batch = random_problem(7, jnp.float64)
        config = random_config(rng)
        pools = poison(oomb_jax.create_pools(model, batch.tokens.shape[-1], config, gradients=False))
        losses, _ = jax.jit(oomb_jax.token_losses, static_argnames="config")(
            model, pools, batch.tokens, batch.labels, config, batch.segments
        )
        assert losses.shape == batch.tokens.shape
        assert (losses[batch.labels == -100] == 0).all()
        mean = losses.sum() / int((batch.labels != -100).sum())
        expected, _, _ = yardstick(model, None, batch.tokens, batch.labels, oomb_jax.Config(), batch.segments)
        np.testing.assert_allclose(mean, expected, rtol=F64_GRADIENT)


def test_segments_that_decrease_are_refused_or_poison_the_loss():
    rng = np.random.default_rng(0)
    model = random_model(rng, dtype=jnp.float32)
    batch = random_batch(rng, (40,), segments=False)
    config = oomb_jax.Config(page=8, chunk=16)
    segments = jnp.where(jnp.arange(40) < 20, 3, 2)
    with pytest.raises(ValueError, match="decrease from 3 to 2 at token 20"):
        oomb_jax.value_and_grad(
            model, oomb_jax.create_pools(model, 40, config), batch.tokens, batch.labels, config, segments
        )
    loss, _, _ = step(model, oomb_jax.create_pools(model, 40, config), batch.tokens, batch.labels, config, segments)
    assert jnp.isnan(loss)
    losses, _ = jax.jit(oomb_jax.token_losses, static_argnames="config")(
        model, oomb_jax.create_pools(model, 40, config), batch.tokens, batch.labels, config, segments
    )
    assert jnp.isnan(losses).all()


def test_wrong_shapes_and_pools_are_refused(untyped):
    model = random_model(np.random.default_rng(0), dtype=jnp.float32)
    config = oomb_jax.Config(page=8, chunk=16)
    tokens = jnp.zeros(40, jnp.int32)
    pools = oomb_jax.create_pools(model, 30, config)
    with pytest.raises(ValueError, match=r"create_pools\(model, 40, config\)"):
        oomb_jax.value_and_grad(model, pools, tokens, tokens, config)
    bare = oomb_jax.create_pools(model, 40, config, gradients=False)
    with pytest.raises(ValueError, match="the gradient pools have 0"):
        oomb_jax.value_and_grad(model, bare, tokens, tokens, config)
    with pytest.raises(ValueError, match="pages of 8 tokens"):
        oomb_jax.value_and_grad(model, pools, tokens, tokens, oomb_jax.Config(page=16, chunk=16))
    with pytest.raises(ValueError, match="labels have shape"):
        check_batch(tokens, tokens[:3], None)
    with pytest.raises(ValueError, match="at least one token"):
        check_batch(tokens[:0], tokens[:0], None)
    with pytest.raises(ValueError, match="labels are float32"):
        check_batch(tokens, tokens.astype(jnp.float32), None)
    with pytest.raises(ValueError, match="at least one token"):
        oomb_jax.create_pools(model, 0, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 100, "page": 16}, "chunk=100: .* page=16; the nearest that fits is 96"),
        ({"page": 4}, "page=4"),
        ({"remat": "some"}, "remat='some'"),
        ({"attention": "top-k"}, "attention='top-k'"),
        ({"implementation": "cudnn"}, "implementation='cudnn'"),
        ({"matmul": "cublas"}, "matmul='cublas'"),
        ({"kv_dtype": "int8"}, "kv_dtype=int8: .* or 'float8_e4m3fn'"),
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype=float8_e5m2: .* or 'float8_e4m3fn'"),
        ({"grad_dtype": "float8_e4m3fn"}, "grad_dtype=float8_e4m3fn"),
        ({"kv_grad_dtype": "float16"}, "kv_grad_dtype=float16: .* use 'bfloat16'"),
    ],
)
def test_wrong_settings_are_refused(settings, message, untyped):
    with pytest.raises(ValueError, match=message):
        oomb_jax.Config(**settings)


def test_equal_settings_are_equal_however_a_dtype_is_spelt():
    spelt = [oomb_jax.Config(kv_dtype=dtype) for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))]
    assert len({hash(config) for config in spelt}) == 1
    assert spelt[0] == spelt[1] == spelt[2]
