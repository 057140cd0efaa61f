"""The dump against `value_and_grad` and full attention, and every source of weights, ids and selections."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import oomb_jax
from oomb_jax import models
from oomb_jax.compare import compare_gradients
from oomb_jax.compare.__main__ import main
from oomb_jax.compare.dump import load_model, read_ids, read_selection
from tests.gradients import random_model
from tests.tolerance import F32_GRADIENT

T = 59  # three chunks of three pages of 8, the last one partial
CONFIG = oomb_jax.Config(chunk=24, page=8)
FLAGS = ("--chunk", "24", "--page", "8")


@pytest.fixture
def source(tmp_path):
    """A directory with weights in bfloat16 and an ids file, as arguments."""
    model = random_model(np.random.default_rng(0), kv_heads=2, group=3, dtype=jnp.bfloat16)
    models.save(model, tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.random.default_rng(1).integers(0, 31, (1, T)))
    return ["--weights", str(tmp_path / "model"), "--ids", str(tmp_path / "ids.npy")]


def dump(source, out, *flags):
    assert main(["dump", *source, *FLAGS, *flags, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("scale", ["tokens", "labels"])
def test_dense_gradients_are_those_of_full_attention(scale, source, tmp_path):
    out = dump(source, tmp_path / "new" / "ours.safetensors", "--loss-scale", scale)
    model = models.load(tmp_path / "model", dtype=jnp.float32)
    tokens = jnp.asarray(np.load(tmp_path / "ids.npy")[0], jnp.int32)
    labels = jnp.roll(tokens, -1).at[-1].set(-100)
    loss, grads, _ = oomb_jax.full_attention_value_and_grad(model, None, tokens, labels, CONFIG)
    factor = (T - 1) / T if scale == "tokens" else 1
    models.save(jax.tree.map(lambda x: x * factor, grads), tmp_path / "expected")
    comparison = compare_gradients(out, tmp_path / "expected")
    assert comparison.worst.relative <= F32_GRADIENT
    assert not comparison.only_a + comparison.only_b
    assert comparison.loss_a == pytest.approx(float(loss) * factor, rel=F32_GRADIENT)
    with safe_open(out, "numpy") as handle:
        about = handle.metadata()
        assert {handle.get_slice(name).get_dtype() for name in handle.keys()} == {"F32"}  # noqa: SIM118
    assert about["T"] == str(T)
    assert about["settings"] == repr(CONFIG)


def test_selection_of_a_dump_gives_its_gradients_again(source, tmp_path):
    """Chunks and pools on one side, full attention under the same pages on the other."""
    method = {"method": "blockwise-tp-sparse", "block_size": 24, "page_size": 8, "page_budget": 2}
    (tmp_path / "method.json").write_text(json.dumps(method | {"grad_ckpt": True, "cpu_offload": None}))
    flags = ["--method", str(tmp_path / "method.json"), "--out", str(tmp_path / "method.safetensors")]
    assert main(["dump", *source, *flags]) == 0
    sparse = dump(source, tmp_path / "sparse.safetensors", "--attention", "topk", "--pages", "2")
    assert compare_gradients(sparse, tmp_path / "method.safetensors").worst.relative <= F32_GRADIENT
    forced = dump(source, tmp_path / "forced.safetensors", "--selection", str(sparse))
    comparison = compare_gradients(sparse, forced)
    assert comparison.worst.relative <= F32_GRADIENT
    assert comparison.others_a == 4  # tables of two layers and two chunks
    dense = dump(source, tmp_path / "dense.safetensors")
    assert compare_gradients(sparse, dense).median > 1e-2


def test_a_chunk_without_a_table_attends_to_all_pages(tmp_path):
    file = tmp_path / "selection.safetensors"
    rng = np.random.default_rng(0)
    # Rows of the partial last chunk: of its two pages with tokens, and, as a dump has them, of all three.
    tables = {f"select.layer{l}.chunk2": np.sort(rng.permutation(6)[:4])[None, None].repeat(2 + l, 1) for l in range(2)}
    save_file({name: x.astype(np.int32) for name, x in tables.items()}, file)
    chosen = read_selection(file, 2, T, CONFIG)
    assert chosen.shape == (2, 9, 4)
    assert (chosen[:, :3] == -1).all()
    assert (chosen[:, 3:6] == [0, 1, 2, -1]).all()
    for l in range(2):
        np.testing.assert_array_equal(chosen[l, 6 : 8 + l], tables[f"select.layer{l}.chunk2"][0])
    assert (chosen[0, 8] == -1).all()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "no tensors named select.layer0.chunk1"),
        ({"select.layer0.chunk1": (3, 2, 0)}, "select.layer0.chunk2 is missing; 6 pages before it are more than 2"),
        ({"select.layer0.chunk1": (4, 2, 0)}, "has 4 rows, not 3: chunk or page is another one"),
        ({"select.layer0.chunk1": (3, 2, 3)}, "names pages 3 to 3 of 3 before it"),
        ({"select.layer0.chunk1": (3, 2, -2)}, "names pages -2 to -2"),
        (
            {"select.layer0.chunk2": (3, 6, 0), "select.layer1.chunk2": (3, 6, 0)},
            "layer1.chunk2 is beyond 1 layers",
        ),
    ],
)
def test_selections_that_do_not_fit_are_refused(tables, message, tmp_path):
    filled = {name: np.full((1, rows, k), page, np.int32) for name, (rows, k, page) in tables.items()}
    save_file(filled | {"other": np.zeros(1)}, tmp_path / "selection.safetensors")
    with pytest.raises(ValueError, match=message):
        read_selection(tmp_path / "selection.safetensors", 1, T, CONFIG)


def test_ids_come_with_labels_or_without(tmp_path):
    tokens = np.array([3, 1, 4, 1, 5], np.int64)
    np.save(tmp_path / "ids.npy", tokens)
    given = np.array([[1, -100, 1, 5, 30]], np.int32)
    save_file({"input_ids": tokens[None], "labels": given}, tmp_path / "ids.safetensors")
    for file, expected in ("ids.npy", [1, 4, 1, 5, -100]), ("ids.safetensors", given[0]):
        ids, labels = read_ids(tmp_path / file, 31)
        assert ids.dtype == labels.dtype == jnp.int32
        np.testing.assert_array_equal(ids, tokens)
        np.testing.assert_array_equal(labels, expected)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"input_ids": np.array([3, 31])}, "input_ids from 3 to 31; the model has 0 to 30"),
        ({"input_ids": np.array([3, -1])}, "input_ids from -1 to 3"),
        ({"input_ids": np.array([3, 4]), "labels": np.array([-5, -100])}, "labels from -5 to -5"),
        ({"input_ids": np.zeros((2, 4), int)}, r"input_ids is int64 of shape \[2, 4\], not whole numbers \[T\]"),
        ({"input_ids": np.zeros(4)}, "input_ids is float64"),
        ({"input_ids": np.zeros(4, int), "labels": np.zeros(3, int)}, "labels is int64"),
        ({"ids": np.zeros(4, int)}, "no tensor named input_ids"),
    ],
)
def test_ids_that_do_not_fit_are_refused(stored, message, tmp_path):
    save_file(stored, tmp_path / "ids.safetensors")
    with pytest.raises(ValueError, match=message):
        read_ids(tmp_path / "ids.safetensors", 31)


def test_weights_of_one_file_among_others(source, tmp_path):
    expected = models.load(tmp_path / "model", dtype=jnp.float32)
    described = (tmp_path / "model" / "config.json").read_text()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    others = {f"grad.{name}": x for name, x in weights.items()} | {"input_ids": np.zeros((1, 9), np.int32)}
    file = tmp_path / "golden.safetensors"
    save_file(weights | others, file)
    with pytest.raises(ValueError, match="--model-config"):
        load_model(file)
    broken = tmp_path / "config.json"
    named = load_model(file, tmp_path / "model" / "config.json")
    broken.write_text(described)
    beside = load_model(file)
    broken.write_text("{}")
    save_file(weights | others, file, {"config": described})
    inside = load_model(file)
    for model in (named, beside, inside):
        assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), model, expected))
    with pytest.raises(ValueError, match=r"has a config\.json of its own"):
        load_model(tmp_path / "model", broken)
    save_file(others, file, {"config": described})
    with pytest.raises(ValueError, match="holds no weights"):
        load_model(file)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--out", "x.npz"), "out=x.npz: gradients go to a .safetensors, .pth or .pt file"),
        (("--out", "x.safetensors", "--pages", "3"), "pages=3: only topk chooses pages"),
        (
            ("--out", "x.safetensors", "--method", "m.json", "--page", "8"),
            "method=m.json and page: the file",
        ),
        (("--out", "x.safetensors", "--page", "24"), "chunk=4096: a chunk is a multiple of page=24"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_any_work(flags, message, capsys):
    assert main(["dump", "--weights", "none", "--ids", "none", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_dump_for_torch_holds_the_same(source, tmp_path):
    pytest.importorskip("torch")
    ours, theirs = dump(source, tmp_path / "a.safetensors"), dump(source, tmp_path / "a.pth")
    comparison = compare_gradients(ours, theirs)
    assert comparison.worst.relative == 0
    assert not comparison.only_a + comparison.only_b
    assert comparison.loss_a == comparison.loss_b
