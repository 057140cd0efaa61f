"""Distances between gradient files against their formulas, in every layout that is read; torch only where installed."""

import json
import math
import re
import sys
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from oomb_jax.compare import compare_gradients
from oomb_jax.compare import gradients as measure
from oomb_jax.compare.__main__ import main
from oomb_jax.compare.files import open_gradients, write_gradients

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight", "lm_head.weight")
SHAPES = ((29, 7), (13,), (7,), (31, 7))


def random_gradients(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in zip(NAMES, SHAPES, strict=True)}


def assert_figures(comparison, a, b):
    """Against the definitions, in one piece."""
    assert {x.name for x in comparison.differences} == a.keys() & b.keys()
    for x in comparison.differences:
        p, q = (y[x.name].astype(np.float64) for y in (a, b))
        distance = np.linalg.norm(p - q)
        np.testing.assert_allclose(x.distance, distance, rtol=1e-12)
        np.testing.assert_allclose(x.relative, distance / np.linalg.norm(q), rtol=1e-12)
        np.testing.assert_allclose(x.cosine, (p * q).sum() / np.linalg.norm(p) / np.linalg.norm(q), rtol=1e-12)
    errors = [x.relative for x in comparison.differences]
    assert errors == sorted(errors, reverse=True)
    assert comparison.median == np.median(errors)


@pytest.mark.parametrize("block", [5, 40, 2**22])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16])
def test_figures_are_those_of_the_definitions(block, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "BLOCK", block)
    a, b = random_gradients(0), random_gradients(1, dtype)
    save_file(a, tmp_path / "a.safetensors", {"loss": "6.25"})
    # A file with weights, ids and gradients in it, as the golden ones are.
    weights = random_gradients(2)
    ids = {"input_ids": np.zeros((1, 9), np.int32)}
    save_file({f"grad.{name}": x for name, x in b.items()} | weights | ids, tmp_path / "b.safetensors", {"loss": "6.5"})
    comparison = compare_gradients(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert_figures(comparison, a, b)
    assert (comparison.loss_a, comparison.loss_b) == (6.25, 6.5)
    assert (comparison.others_a, comparison.others_b) == (0, 5)
    named = compare_gradients(tmp_path / "a.safetensors", tmp_path / "b.safetensors", prefix_b="")
    assert_figures(named, a, weights)


def test_shards_and_names_of_one_side(tmp_path, capsys):
    a, b = random_gradients(0), random_gradients(1)
    shards = tmp_path / "shards"
    shards.mkdir()
    for i, name in enumerate(NAMES[:3]):
        save_file({name: a[name]}, shards / f"model-{i}.safetensors")
    save_file({name: b[name] for name in NAMES[1:]}, tmp_path / "b.safetensors")
    figures = tmp_path / "new" / "figures.json"
    arguments = ["gradients", str(shards), str(tmp_path / "b.safetensors"), "--rows", "1", "--json", str(figures)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"only in A: {NAMES[0]}\nonly in B: {NAMES[3]}\n" in printed
    record = json.loads(figures.read_text())
    worst, other = record["tensors"]
    assert worst["relative"] == record["worst"] > record["median"] > other["relative"]
    figures = f"median relative error {record['median']:.4g}, worst {record['worst']:.4g}"
    assert printed.splitlines()[-2] == f"2 tensors: {figures} ({worst['name']})"
    assert printed.count(worst["name"]) == 2  # row, summary
    assert other["name"] not in printed


def test_nan_is_the_worst_and_zeros_have_no_direction(tmp_path):
    a, b = random_gradients(0), random_gradients(1)
    a[NAMES[2]][3] = np.nan
    a[NAMES[1]][:] = b[NAMES[1]][:] = 0
    b[NAMES[3]][:] = 0
    for file, gradients in ("a", a), ("b", b):
        save_file(gradients, tmp_path / f"{file}.safetensors")
    comparison = compare_gradients(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [x.name for x in comparison.differences] == [NAMES[2], NAMES[3], NAMES[0], NAMES[1]]
    relative = [x.relative for x in comparison.differences]
    assert math.isnan(relative[0])
    assert relative[1] == math.inf
    assert relative[3] == 0
    assert math.isnan(comparison.median)
    assert json.loads(comparison.json())["worst"] is None


def test_large_tensors_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "BLOCK", 2**16)
    for file in "ab":
        save_file({NAMES[0]: np.ones((2**12, 2**10), np.float32)}, tmp_path / f"{file}.safetensors")
    tracemalloc.start()
    comparison = compare_gradients(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert comparison.worst.cosine == 1
    assert peak < 2**22  # of 2 * 2**24 bytes in the files


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        (
            lambda b: b.update({NAMES[1]: np.zeros(12, np.float32)}),
            (),
            r"q_proj.bias \[13\] and \[12\]\. A run with tensor",
        ),
        (lambda b: [b.update({f"x.{name}": b.pop(name)}) for name in NAMES], (), "--prefix-b"),
        (lambda b: None, ("--prefix-a", "grad."), "no floating-point tensor under the prefix 'grad.'"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, flags, message, tmp_path, capsys):
    a, b = random_gradients(0), random_gradients(1)
    change(b)
    files = [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    save_file(a, files[0])
    save_file(b, files[1])
    assert main(["gradients", *files, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line)


def test_broken_and_missing_files_are_named(tmp_path, capsys):
    whole, half = tmp_path / "whole.safetensors", tmp_path / "half.safetensors"
    save_file(random_gradients(0), whole)
    half.write_bytes(whole.read_bytes()[:-9])
    assert main(["gradients", str(whole), str(half)]) == 2
    assert "half.safetensors: not a whole safetensors file" in capsys.readouterr().err
    assert main(["gradients", str(whole), str(tmp_path / "none.safetensors")]) == 2
    assert "none.safetensors" in capsys.readouterr().err


def test_without_torch_a_pth_file_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    save_file(random_gradients(0), tmp_path / "a.safetensors")
    assert main(["gradients", str(tmp_path / "a.safetensors"), str(tmp_path / "b.pth")]) == 2
    assert "pip install torch" in capsys.readouterr().err


def test_a_pth_file_of_the_reference_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    a, b = random_gradients(0), random_gradients(1, jnp.bfloat16)
    save_file(a, tmp_path / "a.safetensors")
    tensors = [torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16) for x in b.values()]
    torch.save({"name": [f"model.{name}" for name in NAMES], "grad": tensors}, tmp_path / "named.pth")
    torch.save(dict(zip(NAMES, tensors, strict=True)) | {"step": 3}, tmp_path / "state.pt")
    for file, others in ("named.pth", 0), ("state.pt", 1):
        comparison = compare_gradients(tmp_path / "a.safetensors", tmp_path / file)
        assert_figures(comparison, a, b)
        assert comparison.others_b == others
    torch.save(tensors, tmp_path / "list.pth")
    torch.save({"name": list(NAMES), "grad": tensors[1:]}, tmp_path / "short.pth")
    (tmp_path / "text.pth").write_text("no tensors")
    for file, message in ("list", "holds list"), ("short", "4 names and 3 gradients"), ("text", "can map into memory"):
        with pytest.raises(ValueError, match=message):
            compare_gradients(tmp_path / "a.safetensors", tmp_path / f"{file}.pth")


@pytest.mark.filterwarnings("ignore")  # of transformers and torch about themselves
def test_a_pth_file_has_the_names_and_the_order_of_the_reference(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 11}
    settings = transformers.Qwen2Config(
        **sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False
    )
    theirs = transformers.Qwen2ForCausalLM(settings).named_parameters()
    shapes = {name: tuple(x.shape) for name, x in theirs}
    rng = np.random.default_rng(0)
    ours = {name: rng.normal(size=shapes[name]).astype(np.float32) for name in sorted(shapes)}
    write_gradients(tmp_path / "ours.pth", ours, 5.5)
    stored = torch.load(tmp_path / "ours.pth")
    assert stored["name"] == [f"model.{name}" for name in shapes]
    with open_gradients(tmp_path / "ours.pth") as read:
        assert read.loss == 5.5
        assert read.tensors.keys() == ours.keys()
        for name, tensor in read.tensors.items():
            np.testing.assert_array_equal(tensor.rows(1, 3), ours[name][1:3])
