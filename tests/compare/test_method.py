"""Method files as the PyTorch implementation has them, and every way to get one wrong."""

import json

import pytest

from oomb_jax import Config, Dense, TopK
from oomb_jax.compare import method_config
from oomb_jax.compare.__main__ import main

CHUNKED = {"method": "blockwise-tp", "block_size": 512, "grad_ckpt": False, "page_size": 64, "cpu_offload": None}
SPARSE = CHUNKED | {"method": "blockwise-tp-sparse", "page_budget": 7}


def test_settings_are_mapped():
    baseline, (note,) = method_config({"method": "baseline-tp", "grad_ckpt": True})
    assert baseline == Config(remat="full")
    assert "in chunks here" in note
    assert method_config(CHUNKED) == (Config(chunk=512, page=64, attention=Dense(), remat="none"), ())
    sparse, notes = method_config(SPARSE | {"grad_ckpt": True, "cpu_offload": 3, "visualize": 0})
    assert sparse == Config(chunk=512, page=64, attention=TopK(pages=7), remat="full", hbm_layers=3)
    assert [note.split(":")[0] for note in notes] == ["cpu_offload=3", "visualize=0"]
    assert method_config(SPARSE | {"visualize": None})[1] == ()
    backend = {"attention_backend": "paged", "attention_kv_block_size": 128}
    config, (note,) = method_config(CHUNKED | backend)
    assert config == method_config(CHUNKED)[0]
    assert note.startswith("attention_backend, attention_kv_block_size: ")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (SPARSE | {"method": "blockwise"}, "method='blockwise': one of baseline-tp, blockwise-tp, "),
        ({}, "method=None"),
        (SPARSE | {"top_k": 3}, "top_k: unknown to method 'blockwise-tp-sparse', which has block_size"),
        (CHUNKED | {"page_budget": 3}, "page_budget: unknown to method 'blockwise-tp'"),
        (
            {key: SPARSE[key] for key in ("method", "grad_ckpt", "page_size")},
            "block_size, cpu_offload, page_budget missing",
        ),
        (SPARSE | {"grad_ckpt": 1}, "grad_ckpt=1: true or false"),
        (SPARSE | {"page_budget": True}, "page_budget=True: a whole number from 1"),
        (SPARSE | {"page_size": "64"}, "page_size='64'"),
        (SPARSE | {"cpu_offload": 0}, "cpu_offload=0"),
        (SPARSE | {"visualize": -1}, "visualize=-1: a whole number from 0"),
        (SPARSE | {"block_size": 500}, "chunk=500: a chunk is a multiple of page=64"),
    ],
)
def test_mistakes_are_named(raw, message):
    with pytest.raises(ValueError, match=message):
        method_config(raw)


def test_command_prints_the_config(tmp_path, capsys):
    file = tmp_path / "method.json"
    file.write_text(json.dumps(SPARSE | {"cpu_offload": 2}))
    assert main(["config", str(file)]) == 0
    note, printed = capsys.readouterr().out.splitlines()
    assert note.startswith("note: cpu_offload=2: ")
    assert eval(printed, {"Config": Config, "TopK": TopK}) == method_config(SPARSE | {"cpu_offload": 2})[0]
    for text in ("{", "[1]", json.dumps(SPARSE | {"page": 1})):
        file.write_text(text)
        assert main(["config", str(file)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {file}: ")
