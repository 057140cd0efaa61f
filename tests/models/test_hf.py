"""Directories as transformers writes and reads them: round trips, every fault, and no half model."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from oomb_jax import models
from oomb_jax.models import hf
from tests.models.test_qwen2 import logits_of
from tests.tolerance import PARITY_LOGITS

GOLDEN = Path(__file__).parents[1] / "golden"
UNTIED, TIED = GOLDEN / "qwen2_untied", GOLDEN / "qwen2_tied"


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def directory(tmp_path):
    """A copy of the tied golden model, to be spoilt."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(TIED / file, tmp_path)
    return tmp_path


def change_config(directory, **settings):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change_weights(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("source", [UNTIED, TIED])
def test_save_then_load_is_bit_equal(source, dtype, shard_bytes, tmp_path):
    model = models.load(source, dtype=dtype)
    models.save(model, tmp_path, shard_bytes=shard_bytes)
    assert_equal(models.load(tmp_path), model)
    files = {file.name for file in tmp_path.iterdir()}
    if shard_bytes == 10**9:
        assert files == {"config.json", "model.safetensors"}
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        shards = set(index["weight_map"].values())
        assert len(shards) >= 3
        assert files == {"config.json", "model.safetensors.index.json", *shards}
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(model))
        assert all(name in load_file(tmp_path / shard) for name, shard in index["weight_map"].items())


def test_saved_files_are_those_of_transformers(tmp_path):
    models.save(models.load(UNTIED), tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(UNTIED / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_new_save_leaves_nothing_of_the_old_and_touches_nothing_else(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    models.save(models.load(UNTIED), tmp_path, shard_bytes=20_000)
    tied = models.load(TIED)
    models.save(tied, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert_equal(models.load(tmp_path), tied)


def test_a_failed_save_keeps_the_old_model(directory, monkeypatch):
    old, new = models.load(directory), models.load(UNTIED)
    written = []

    def full_disk(tensors, path, metadata):
        if written:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(hf, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        models.save(new, directory, shard_bytes=20_000)
    assert {file.name for file in directory.iterdir()} == {"config.json", "model.safetensors"}
    assert_equal(models.load(directory), old)


@pytest.mark.parametrize("renames", range(4))
def test_an_interrupted_save_is_never_taken_for_a_model(directory, monkeypatch, renames):
    """Whichever rename is the last, the directory holds no model or the new one."""
    new = models.load(UNTIED)
    replace = Path.replace
    done = []

    def interrupted(path, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.save(new, directory, shard_bytes=20_000)
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        models.load(directory)


def test_one_error_names_every_faulty_tensor(directory):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.k_proj.bias"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((56, 40), np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.zeros(40, np.int8)

    change_weights(directory, spoil)
    with pytest.raises(ValueError, match="the weights are not those") as error:
        models.load(directory)
    for part in (
        "missing model.layers.1.self_attn.k_proj.bias, model.norm.weight;",
        "surplus model.layers.2.mlp.up_proj.weight;",
        "model.layers.0.mlp.down_proj.weight has shape [56, 40], not [40, 56]",
        "model.layers.0.input_layernorm.weight is I8",
    ):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tied_model_may_come_with_a_copy_of_its_embedding(directory):
    change_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_equal(models.load(directory), models.load(TIED))


def test_a_tied_model_with_another_head_is_refused(directory):
    change_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head"):
        models.load(directory)
    change_config(directory, tie_word_embeddings=False)
    assert models.load(directory).lm_head is not None


def test_files_of_mixed_dtypes_need_a_choice(directory):
    change_weights(directory, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(np.float16)}))
    with pytest.raises(ValueError, match="holds F16 and F32 tensors; choose one with dtype="):
        models.load(directory)
    assert models.load(directory, dtype=jnp.bfloat16).norm.weight.dtype == jnp.bfloat16


def test_missing_and_broken_files(directory):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        models.load(directory / "nowhere")
    models.save(models.load(directory), directory, shard_bytes=20_000)
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{shard.name}: not a whole safetensors file"):
        models.load(directory)
    shard.unlink()
    index = (directory / "model.safetensors.index.json").read_text()
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json: has no weight_map"):
        models.load(directory)
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FileNotFoundError, match=f"names files that are not there: {shard.name}"):
        models.load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not a JSON file"):
        models.load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json: not found"):
        models.load(directory)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "only Qwen2ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights are not supported"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding windows are not"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with sliding_attention"),
        ({"vocab_size": None, "hidden_size": None}, "vocab_size, hidden_size missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope type 'llama3' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope type 'su' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1.0}}, "'linear' has no setting beta_fast"),
        ({"rope_scaling": {"factor": 2.0}}, "'default' has no setting factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "give the number of tokens as ctx="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ],
)
def test_what_the_model_does_not_do_is_refused(directory, settings, message):
    change_config(directory, **settings)
    with pytest.raises(ValueError, match=message) as error:
        models.load(directory)
    assert "config.json: " in str(error.value)


def test_a_sliding_window_that_no_layer_has_is_no_fault(directory):
    change_config(directory, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert_equal(models.load(directory), models.load(TIED))


def test_special_tokens_survive(tmp_path):
    config = dataclasses.replace(models.config("tiny"), bos_token_id=3, eos_token_id=(4, 5))
    model = models.create(config, key=jax.random.key(0))
    models.save(model, tmp_path)
    assert_equal(models.load(tmp_path), model)


@pytest.mark.filterwarnings("ignore")  # of transformers and torch about themselves
@pytest.mark.parametrize("rope", ["default", "dynamic", "yarn"])
def test_transformers_loads_what_we_save_and_computes_the_same(rope, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    scaling = {
        "default": models.Rope(theta=1e6),
        "dynamic": models.Rope(kind="dynamic", factor=3.0, ctx=50, max_position_embeddings=16),
        "yarn": models.Rope(kind="yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.2),
    }[rope]
    config = dataclasses.replace(models.config("tiny"), rope=scaling, initializer_range=0.2)
    model = models.create(config, key=jax.random.key(1), dtype=jnp.float32)
    models.save(model, tmp_path, shard_bytes=100_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 50, dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    np.testing.assert_allclose(jax.jit(logits_of)(model, jnp.asarray(tokens)), expected, rtol=0, atol=PARITY_LOGITS)
