"""docs/compare.md tells the truth: its commands run as they stand, and give the figures that it names."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from oomb_jax.compare.__main__ import main
from tests.tolerance import REFERENCE_MEDIAN, REFERENCE_WORST, SPARSE_REFERENCE_MEDIAN, SPARSE_REFERENCE_WORST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with the checkout's files, to write into, and with the files that the page shows."""
    for name in ("tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (method,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "sparse.json").write_text(method)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_run_and_give_the_figures(checkout, capsys):
    commands = re.findall(r"^    python -m oomb_jax\.compare (.*)$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["dump", "gradients"] * 2 + ["config", "efficiency"]
    assert [main(shlex.split(command)) for command in commands] == [0] * 6
    printed = capsys.readouterr().out
    assert "Config(chunk=1024, page=64, attention=TopK(pages=4," in printed
    (line,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert line in (ROOT / "benchmarks" / "results" / "reference-h200" / "topk.txt").read_text()
    assert "60.72" in printed
    assert (checkout / "runs" / "compare" / "efficiency.png").stat().st_size > 0
    limits = {
        "dense": (REFERENCE_MEDIAN, REFERENCE_WORST),
        "sparse": (SPARSE_REFERENCE_MEDIAN, SPARSE_REFERENCE_WORST),
    }
    named = re.findall(r"median relative error ([\d.]+), worst ([\d.]+)`", PAGE)
    for (name, bounds), figures in zip(limits.items(), named, strict=True):
        record = json.loads((checkout / "runs" / "compare" / f"{name}.json").read_text())
        found = record["median"], record["worst"]
        assert all(np.array(found) <= bounds)
        # In float32 sums of another order move the last digits.
        np.testing.assert_allclose(found, [float(x) for x in figures], rtol=1e-2)
        assert len(record["tensors"]) == 39
        np.testing.assert_allclose(record["loss_a"], record["loss_b"], rtol=2**-8)  # b is rounded to bfloat16
