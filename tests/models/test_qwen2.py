"""Qwen2 against transformers, its named sizes, and what the engine relies on."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from oomb_jax import models
from oomb_jax.shapes import accumulator
from tests.tolerance import PARITY_GRADIENT, PARITY_LOGITS

GOLDEN = Path(__file__).parents[1] / "golden"
ROPES = json.loads((GOLDEN / "qwen2_untied" / "ropes.json").read_text())
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
}


def logits_of(model, tokens):
    """Full attention over one sequence, written for clarity."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    h = model.embed(tokens)
    for l in range(model.config.num_hidden_layers):
        layer = jax.tree.map(lambda x, l=l: x[l], model.layers)
        q, k, v = layer.attention_inputs(h, positions)
        k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
        scores = jnp.where(jnp.tri(len(tokens), dtype=bool)[None], scores, -jnp.inf)
        h = layer.attention_output(h, jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v))
    return jnp.matmul(*model.head(h), preferred_element_type=accumulator(h.dtype))


def loss_of(model, tokens):
    """Mean over the next tokens of all sequences."""
    log_p = jax.nn.log_softmax(jax.vmap(lambda row: logits_of(model, row))(tokens)[:, :-1], axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1))


def relative_error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen2_tied"])
def test_logits_loss_and_gradients_are_those_of_transformers(name, tmp_path):
    expected = load_file(GOLDEN / name / "expected.safetensors")
    tokens = jnp.asarray(expected["input_ids"])
    model = models.load(GOLDEN / name)
    logits = jax.jit(jax.vmap(logits_of, (None, 0)))(model, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=PARITY_LOGITS)

    loss, grads = jax.jit(jax.value_and_grad(loss_of))(model, tokens)
    assert float(loss) == pytest.approx(float(expected["loss"]), abs=PARITY_LOGITS)
    # Through the files, so that names and layouts of gradients are checked too.
    models.save(grads, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    wanted = {key.removeprefix("grad."): value for key, value in expected.items() if key.startswith("grad.")}
    assert written.keys() == wanted.keys()
    errors = {key: relative_error(written[key], wanted[key]) for key in wanted}
    assert max(errors.values()) <= PARITY_GRADIENT, errors


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scalings_are_those_of_transformers(rope, tmp_path):
    expected = load_file(GOLDEN / "qwen2_untied" / "expected.safetensors")
    tokens = jnp.asarray(expected["input_ids"][0])
    unscaled, scaled = expected["logits"][0], expected[f"logits.{rope}"]
    shutil.copy(GOLDEN / "qwen2_untied" / "model.safetensors", tmp_path)
    config = json.loads((GOLDEN / "qwen2_untied" / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | ROPES[rope]))
    model = models.load(tmp_path, ctx=len(tokens))
    np.testing.assert_allclose(jax.jit(logits_of)(model, tokens), scaled, rtol=0, atol=PARITY_LOGITS)
    assert np.abs(scaled - unscaled).max() > 100 * PARITY_LOGITS  # the golden file tells the two apart

    # What is written back means the same.
    models.save(model, tmp_path / "copy")
    assert models.load(tmp_path / "copy", ctx=len(tokens)).config == model.config


def test_bfloat16_stays_near_float32():
    expected = load_file(GOLDEN / "qwen2_untied" / "expected.safetensors")
    tokens = jnp.asarray(expected["input_ids"][0])
    model = models.load(GOLDEN / "qwen2_untied", dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    logits = jax.jit(logits_of)(model, tokens)
    assert logits.dtype == jnp.float32
    assert relative_error(logits, expected["logits"][0]) < 0.05


def test_float64_is_float64_throughout():
    expected = load_file(GOLDEN / "qwen2_tied" / "expected.safetensors")
    with jax.enable_x64(True):
        model = models.load(GOLDEN / "qwen2_tied", dtype=jnp.float64)
        text = str(jax.make_jaxpr(logits_of)(model, jnp.asarray(expected["input_ids"][0])))
        assert "f64" in text
        assert "f32" not in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_count(name):
    model = models.abstract(name)
    assert models.parameter_count(model) == PUBLISHED[name]
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.shape[0] for x in jax.tree.leaves(model.layers)} == {model.config.num_hidden_layers}


def test_every_name_has_a_published_size():
    assert set(models.names()) == {"tiny", *PUBLISHED}


def test_random_weights():
    config = dataclasses.replace(models.config("tiny"), initializer_range=0.3, tie_word_embeddings=False)
    model = models.create(config, key=jax.random.key(0), dtype=jnp.float32)
    assert jax.tree.structure(model) == jax.tree.structure(models.abstract(config, dtype=jnp.float32))
    again = models.create(config, key=jax.random.key(0), dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, model, again)
    for name, x in zip(jax.tree.leaves(models.parameter_names(model)), jax.tree.leaves(model), strict=True):
        if name.endswith("bias"):
            assert not np.any(x), name
        elif "norm" in name:
            assert np.all(x == 1), name
        else:
            # All rows of all layers are draws of their own.
            rows = np.asarray(x).reshape(-1, x.shape[-1])
            assert len(np.unique(rows[:, 0])) == len(rows), name
            assert rows.std() == pytest.approx(0.3, rel=0.05), name
            assert rows.mean() == pytest.approx(0, abs=0.02), name


def test_creation_needs_no_float32_copy_of_the_model():
    config = models.config("qwen2.5-7b")  # compiled, never run
    create = jax.jit(lambda key: models.Qwen2(config, key=key, dtype=jnp.bfloat16))
    memory = create.lower(jax.random.key(0)).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 8


def test_parameter_names():
    names = models.parameter_names(models.abstract("qwen2.5-7b"))
    assert set(jax.tree.leaves(names.layers.q_proj)) == {"layers.q_proj.weight", "layers.q_proj.bias"}
    outer = {name for name in jax.tree.leaves(names) if not name.startswith("layers.")}
    assert outer == {"embed_tokens.weight", "norm.weight", "lm_head.weight"}


def test_outer_parts_do_not_touch_the_layers():
    model = models.create("tiny", key=jax.random.key(0), dtype=jnp.float32)
    outer = copy.copy(model)
    outer.layers = None
    factors, vjp = jax.vjp(lambda outer: outer.head(outer.embed(jnp.arange(7, dtype=jnp.int32))), outer)
    (grads,) = vjp(factors)
    assert jax.tree.structure(grads) == jax.tree.structure(outer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads=3: a multiple of"),
        ({"head_dim": 7}, "head_dim=7: an even number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: at least 1"),
    ],
)
def test_impossible_sizes_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(models.config("tiny"), **settings)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"did you mean 'qwen2.5-7b'\? One of tiny, qwen2.5-0.5b"):
        models.create("Qwen2.5-7B-Instruct", key=jax.random.key(0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn, jnp.float64])
def test_impossible_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype="):
        models.create("tiny", key=jax.random.key(0), dtype=dtype)
