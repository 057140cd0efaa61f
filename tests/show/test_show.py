"""What `python -m oomb_jax.show` says and draws, against counts made the long way."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import oomb_jax
from oomb_jax.full_attention import selected
from oomb_jax.parts import layer_at
from oomb_jax.selection import TopK
from oomb_jax.sequence import segment_positions
from oomb_jax.show import plots, runs, selection
from oomb_jax.show.__main__ import main
from oomb_jax.train.__main__ import USAGE
from oomb_jax.train.__main__ import main as train
from oomb_jax.train.data import Batch
from oomb_jax.train.metrics import MetricsWriter
from tests.gradients import random_batch, random_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(rng.choice(["chunk", "page", "layer", "token"], 9000)))
    return path


def png_size(path):
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


@pytest.mark.parametrize("segments", [False, True])
def test_recall_is_that_of_dense_probabilities(segments):
    """A model of one layer, so that full attention has the same queries and keys."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(int(segments))
        model = random_model(rng, layers=1, group=2, kv_heads=1)
        T, page, config = 118, 8, oomb_jax.Config(page=8, chunk=24, attention=TopK(pages=2))
        data = random_batch(rng, (1, T), segments=segments)
        ids = None if data.segments is None else np.asarray(data.segments)
        batch = Batch(tokens=np.asarray(data.tokens), labels=np.asarray(data.labels), segments=ids)
        choice = selection.run(model, batch, config, Console(file=io.StringIO()))
        assert choice.query_pages == -(-T // page)
        assert max(choice.recall) == 4  # the last chunk, which is partial

        row = None if ids is None else jnp.asarray(ids[0])
        positions = jnp.arange(T, dtype=jnp.int32) if row is None else segment_positions(row)
        q, k, _ = layer_at(model.layers, 0).attention_inputs(model.embed(data.tokens[0]), positions)
        mask = np.tril(np.ones((T, T), bool)) & (True if row is None else np.asarray(row[:, None] == row[None]))
        scores = np.einsum("tmgh,umh->mgtu", q.reshape(T, 1, 2, -1), k) / np.sqrt(q.shape[-1])
        p = np.asarray(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1))
        table = jnp.asarray(choice.tables[:, 0, :, 0].reshape(-1, 2))
        named = np.asarray(selected(table, T, config))[0]
        chunk = np.arange(T) // config.chunk
        far = chunk[:, None] != chunk[None]
        for c, (recall,) in choice.recall.items():
            first = c * config.chunk // page
            at = slice(first * page, min(first * page + config.chunk, T))
            expected, everything = (p[:, :, at][:, :, seen[at]].sum() for seen in (named & far, far))
            if c < max(choice.recall):  # where padding joins a page of queries, its own attention counts too
                np.testing.assert_allclose(recall, expected / everything, rtol=1e-9)
            assert 0 < recall <= 1


@pytest.mark.parametrize("cell", [1, 2, 3])  # the last cell of 3 is partial
def test_density_is_the_share_of_chosen_pairs(cell):
    rng = np.random.default_rng(cell)
    n, R, M, K = 5, 4, 2, 3
    table = np.full((n, R, M, K), -1)
    for c, r, m in np.ndindex(n, R, M):
        chosen = rng.permutation(c * R)[: rng.integers(0, K + 1)]
        table[c, r, m, : len(chosen)] = chosen
    pairs = np.zeros((n * R, n * R))
    for c, r, m, i in np.argwhere(table >= 0):
        pairs[c * R + r, table[c, r, m, i]] += 1 / M
    cells = -(-n * R // cell)
    edges = [(a * cell, (a + 1) * cell) for a in range(cells)]
    expected = [[pairs[a:b, c:d].mean() for c, d in edges] for a, b in edges]
    np.testing.assert_allclose(plots.density(table, cell, cells), expected, atol=1e-12)


def test_a_long_sequence_is_drawn_in_few_cells(tmp_path):
    """32,768 pages."""
    rng = np.random.default_rng(0)
    n, L, R, K = 1024, 2, 32, 4
    tables = rng.integers(0, np.maximum(np.arange(n) * R, 1)[:, None, None, None, None], (n, L, R, 1, K))
    tables[0] = -1
    path = plots.draw_choice(tables, n * R, "title", tmp_path / "long.png")
    width, height = png_size(path)
    assert width < 2000
    assert height < 1000
    assert -(-n * R // -(-n * R // plots.CELLS)) <= plots.CELLS


def test_selection_of_a_named_model_and_of_a_run(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = tmp_path / "pictures"
    shape = ["--data", str(text), "--platform", "cpu", "--chunk", "64", "--page", "16"]
    assert main(["selection", "--ctx", "300", "--pages", "3", *shape, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "tiny, random weights; 300 tokens" in printed
    assert "most chosen page" in printed
    layers = json.loads((out / "selection.json").read_text())["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    for layer in layers:
        assert 0 < layer["recall"] <= 1
        assert 0 < layer["attention_share"] < 1
        assert 0 < layer["distinct_pages"] <= 12
        assert layer["median_distance"] % 16 == 0
        assert 0 < layer["chosen_by"] <= 1
    assert all(min(png_size(out / name)) > 300 for name in ("selection.png", "recall.png"))

    run = tmp_path / "run"
    flags = ["--model", "tiny", "--ctx", "300", "--steps", "1", "--heldout", "0", "--pages", "2"]
    assert train([*flags, *shape, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["selection", "--run", str(run), "--platform", "cpu"]) == 0
    assert "2 chosen by all_heads" in capsys.readouterr().out
    assert (run / "selection.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ctx", "300", "--pages", "16"], "pages=16 would choose them all"),
        (["--ctx", "99999999"], "longer than data="),
        (["--run", "nowhere"], "no such file"),
    ],
)
def test_what_cannot_be_shown_is_one_line(text, capsys, flags, message):
    shape = ["--data", str(text), "--platform", "cpu", "--chunk", "64", "--page", "16"]
    assert main(["selection", *flags, *shape]) == USAGE
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert message in line


def test_runs_are_compared_where_both_have_steps(tmp_path, capsys):
    for name, scale, steps in (("dense", 1.0, 30), ("topk", 1.01, 25)):
        with MetricsWriter(tmp_path / name) as writer:
            for step in range(1, steps + 1):
                writer.write(step, {"loss": scale * 60 / step, "tokens_per_second": 100 * scale})
            writer.write_evaluation(20, loss=scale * 2)
            writer.write_evaluation(steps, loss=9.0)
    rows = runs.compare(tmp_path / "dense", tmp_path / "topk")
    assert rows["training loss, steps 6 to 25"]["first"] == pytest.approx(np.mean([60 / i for i in range(6, 26)]))
    assert rows["training loss, steps 6 to 25"]["difference"] == pytest.approx(0.01)
    assert rows["held-out loss after step 20"]["second"] == pytest.approx(2.02)
    assert main(["runs", str(tmp_path / "dense"), str(tmp_path / "topk")]) == 0
    assert "+1.00%" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), str(tmp_path / "topk")]) == USAGE
    assert "no step in metrics.jsonl" in capsys.readouterr().err
