"""Keys and values of earlier chunks in float8: gradients against full attention to what the pools hold."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from safetensors.flax import load_file

import oomb_jax
from oomb_jax.pallas_kernels.page_move import quantise
from oomb_jax.parts import layer_at
from tests.gradients import errors_by_tensor, gradient_error, poison, random_batch, random_model
from tests.tolerance import F32_GRADIENT, F64_GRADIENT, FLOAT8_MEDIAN, FLOAT8_WORST

FLOAT8 = "float8_e4m3fn"
GOLDEN = Path(__file__).parent / "golden" / "reference_dense"

step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")


def widened(x, page, T):
    """[n S, M, H] as a pool gives it back: float8 of the first T tokens, times the scale of a page and head."""
    pages = x.reshape(-1, page, *x.shape[1:]).swapaxes(1, 2)
    tokens = np.clip(T - page * np.arange(len(pages)), 0, page)
    kept, scales = quantise(pages, jnp.asarray(tokens, jnp.int32))
    return (kept.astype(jnp.float32) * scales[:, :, None, None]).swapaxes(1, 2).reshape(x.shape).astype(x.dtype)


def plain_attention(q, k, v, own, earlier, page, T):
    """Softmax over the keys [T, T] that `own` allows, as they are, and those that `earlier` [m, T, T] does, rounded;
    what of the probability lies on the latter. The gradient passes the rounding."""
    rounded = lambda x: x + lax.stop_gradient(widened(x, page, T) - x)
    group = q.shape[1] // k.shape[1]
    by_head = lambda x: jnp.repeat(x, group, axis=1)
    product = lambda keys: jnp.einsum("tnh,unh->ntu", q, by_head(keys)) * k.shape[-1] ** -0.5
    scores = lambda keys, mask: jnp.where(mask, product(keys), -jnp.inf)
    mask = jnp.repeat(jnp.broadcast_to(earlier, (k.shape[1], *own.shape)), group, axis=0)
    both = jnp.concatenate([scores(k, own[None]), scores(rounded(k), mask)], axis=-1)
    weights = jax.nn.softmax(both, axis=-1)
    values = jnp.concatenate([by_head(v), by_head(rounded(v))])
    return jnp.einsum("ntu,unh->tnh", weights, values), jnp.sum(weights[:, :, len(k) :], axis=2)


def plain(model, batch, config, selection=None):
    """Loss, gradient, and for Top-K the mass of each layer, by plain attention over a sequence of whole chunks."""
    T, C, S = len(batch.tokens), config.chunk, config.page
    whole = -(-T // C) * C
    pad = lambda x, **how: jnp.pad(x, (0, whole - T), **how)
    segments = pad(jnp.zeros(T, jnp.int32) if batch.segments is None else batch.segments, mode="edge")
    tokens, labels = pad(batch.tokens), pad(batch.labels, constant_values=-100)
    index = np.arange(whole)
    same = segments[:, None] == segments[None]
    own = same & (index[:, None] >= index[None]) & (index[:, None] // C == index[None] // C)
    before = same & (index[:, None] // C > index[None] // C)
    start = jnp.searchsorted(segments, segments)
    positions = jnp.asarray(index, jnp.int32) - start.astype(jnp.int32)
    if batch.segments is not None:
        positions = pad(positions[:T])  # what the engine gives padding, which counts in the mass

    def loss(model):
        h, mass = model.embed(tokens), []
        for l in range(model.config.num_hidden_layers):
            layer = layer_at(model.layers, l)
            q, k, v = layer.attention_inputs(h, positions)
            earlier = before[None]
            if selection is not None:
                lists = selection[l].reshape(whole // S, -1, selection.shape[-1])
                named = jax.nn.one_hot(lists, whole // S, dtype=bool).any(axis=2).swapaxes(0, 1)  # [m, pages, pages]
                earlier = before[None] & named[:, index // S][:, :, index // S]
                _, dense = plain_attention(q, k, v, own, before[None], S, T)
                sample = (index >= whole - C) & np.isin((index - (whole - C)) // S, (0, C // S // 2))
                mass.append(dense[:, sample].sum())
            o, _ = plain_attention(q, k, v, own, earlier, S, T)
            h = layer.attention_output(h, o)
        x, weight = model.head(h)
        logits = jax.nn.log_softmax(x @ weight)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        valid = labels != -100
        return -jnp.where(valid, picked, 0).sum() / valid.sum(dtype=picked.dtype), jnp.asarray(mass)

    (value, mass), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(model)
    return value, grads, mass


def problem(seed, attention=None, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    group, kv_heads = [(1, 2), (3, 1), (2, 3)][seed % 3]
    model = random_model(rng, layers=1 + seed % 3, group=group, kv_heads=kv_heads, tied=seed % 4 < 2, dtype=dtype)
    batch = random_batch(rng, (int(rng.integers(100, 200)),), segments=seed % 2 == 1)
    config = oomb_jax.Config(
        page=8,
        chunk=8 * int(rng.integers(2, 5)),
        attention=attention or oomb_jax.Dense(),
        remat=("none", "dots", "full")[seed % 3],
        hbm_layers=[None, 0, 1][int(rng.integers(3))],
        kv_dtype=FLOAT8,
    )
    return model, batch, config


def run(model, batch, config):
    pools = poison(oomb_jax.create_pools(model, len(batch.tokens) + 40, config))
    return step(model, pools, batch.tokens, batch.labels, config, batch.segments)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_attention_to_rounded_pages(seed):
    with jax.enable_x64(True):
        model, batch, config = problem(seed)
        loss, grads, _ = run(model, batch, config)
        expected_loss, expected, _ = plain(model, batch, config)
        assert abs(float(loss - expected_loss)) <= F64_GRADIENT * float(expected_loss)
        error, name = gradient_error(grads, expected)
        assert error <= F64_GRADIENT, (config, name)
        if seed == 0:  # and the rounding matters
            exact = run(model, batch, dataclasses.replace(config, kv_dtype=None))[1]
            assert gradient_error(exact, expected)[0] > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_top_k_gradients_are_those_of_attention_to_rounded_pages(seed):
    with jax.enable_x64(True):
        attention = oomb_jax.TopK(pages=2, scope="kv_head" if seed % 2 else "all_heads")
        model, batch, config = problem(seed, attention)
        T, chunks = len(batch.tokens), -(-len(batch.tokens) // config.chunk)
        loss, grads, pools = run(model, batch, config)
        chosen = pools.selection[:chunks]
        selection = jnp.moveaxis(chosen, 1, 0).reshape(chosen.shape[1], -1, *chosen.shape[3:])
        expected_loss, expected, mass = plain(model, batch, config, selection)
        assert abs(float(loss - expected_loss)) <= F64_GRADIENT * float(expected_loss)
        error, name = gradient_error(grads, expected)
        assert error <= F64_GRADIENT, (config, name)
        np.testing.assert_allclose(pools.mass[:, 1], mass, rtol=F64_GRADIENT)

        if seed == 0:  # Pages are chosen by keys as they were: those of the first layer do not depend on any pool.
            exact = run(model, batch, dataclasses.replace(config, kv_dtype=None))[2]
            np.testing.assert_array_equal(chosen[:, 0], exact.selection[:chunks, 0])
        # Padding is not kept, nor does it set a scale: every page has a value in the upper half of its range.
        held = pools.any_layers
        pages = -(-T // config.page)
        last = np.abs(np.asarray(held.k[:, pages - 1], np.float64))
        assert (last[:, :, (T - 1) % config.page + 1 :] == 0).all()
        assert (np.abs(np.asarray(held.k[:, :pages], np.float64)).max(axis=(3, 4)) > 200).all()


@pytest.mark.parametrize(
    ("dtype", "attention"), [("bfloat16", oomb_jax.Dense()), ("float32", oomb_jax.TopK(pages=3))], ids=["dense", "topk"]
)
def test_memory_of_the_pools_does_not_change_a_bit(dtype, attention):
    model, batch, config = problem(1, attention, dtype)  # two layers
    in_hbm, mixed = (dataclasses.replace(config, hbm_layers=n) for n in (None, 1))
    (loss, grads, pools), (same_loss, same, moved) = (run(model, batch, placed) for placed in (in_hbm, mixed))
    assert pools.host is None
    assert (len(moved.hbm.k), len(moved.host.k)) == (1, 1)
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), (loss, grads, pools.mass), (same_loss, same, moved.mass))
    assert all(jax.tree.leaves(equal))


def test_token_losses_are_those_of_the_step():
    model, batch, config = problem(0, dtype=jnp.float32)
    config = dataclasses.replace(config, hbm_layers=None)
    pools = poison(oomb_jax.create_pools(model, len(batch.tokens), config, gradients=False))
    losses = jax.jit(oomb_jax.token_losses, static_argnames="config")
    by_token, _ = losses(model, pools, batch.tokens, batch.labels, config)
    mean = by_token.sum() / int((batch.labels != -100).sum())
    np.testing.assert_allclose(mean, run(model, batch, config)[0], rtol=F32_GRADIENT)


def test_gradient_error_of_float8_is_bounded(tmp_path):
    model = oomb_jax.models.load(GOLDEN, dtype=jnp.float32)
    tokens = load_file(GOLDEN / "gradients.safetensors")["input_ids"][0, :1024]
    labels = jnp.roll(tokens, -1).at[-1].set(-100)
    config = oomb_jax.Config(chunk=256, page=64)
    grads = {}
    for dtype in None, "bfloat16", FLOAT8:
        narrow = dataclasses.replace(config, kv_dtype=dtype)
        grads[dtype] = step(model, oomb_jax.create_pools(model, len(tokens), narrow), tokens, labels, narrow)[1]
    oomb_jax.models.save(grads[None], tmp_path / "exact")
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    wide, narrow = (errors_by_tensor(grads[dtype], exact, 1, tmp_path) for dtype in ("bfloat16", FLOAT8))
    assert np.median(narrow) <= FLOAT8_MEDIAN
    assert np.max(narrow) <= FLOAT8_WORST
    assert 8 * np.median(wide) < np.median(narrow) < 32 * np.median(wide)  # 4 bits of fraction fewer, or 5 of rounding


def test_what_does_not_go_with_float8_is_refused():
    config = oomb_jax.Config(page=8, chunk=16, kv_dtype=FLOAT8)
    half = random_model(np.random.default_rng(0), dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"kv_dtype=float8_e4m3fn for a float16 model: .* leave kv_dtype out"):
        oomb_jax.create_pools(half, 40, config)
    model, tokens = random_model(np.random.default_rng(0), dtype=jnp.float32), jnp.zeros(40, jnp.int32)
    exact = dataclasses.replace(config, kv_dtype=None)
    for made, used in (config, exact), (exact, config):
        with pytest.raises(ValueError, match=r"the pools hold float.*create_pools\(model, 40, config\)"):
            oomb_jax.value_and_grad(model, oomb_jax.create_pools(model, 40, made), tokens, tokens, used)
