"""Time and memory out of logs and JSON, their ratios, and the picture."""

import json

import matplotlib.image
import pytest

from oomb_jax.compare.__main__ import main
from oomb_jax.compare.efficiency import Figures, read_runs, table

LOG = """\
\x1b[33mBase GPU memory allocated:\x1b[39;49;00m\x1b[32m14526 MB\x1b[39;49;00m
step-2     | loss: 0.000 | avg time: 12.500 | max memory: 20480.000 | seq len:      32768
[rank1]: step-1     | loss: 0.000 | avg time: 50.000 | max memory: 30720.000 | seq len:      65536
[rank0]: step-1     | loss: 0.000 | avg time: 49.000 | max memory: 30976.000 | seq len:      65536
\x1b[33m131072\t|\x1b[39;49;00m210.250\t| 40960.000
"""
RECORD = {"method": "chunked", "remat": "dots", "steps": 2, "context": 65536, "seconds": 12.5, "memory_gib": 60.5}


def test_figures_of_a_log_and_of_a_benchmark(tmp_path):
    (tmp_path / "dense.log").write_text(LOG)
    records = [
        RECORD,
        RECORD | {"context": 32768, "seconds": 5.0, "steps": 3, "distinct_pages": 9.5, "gigabytes": {"fill": 1}},
        RECORD | {"remat": "full", "seconds": 20},
    ]
    (tmp_path / "step.json").write_text(json.dumps(records))
    theirs, *ours = read_runs([tmp_path / "dense.log", tmp_path / "step.json"])
    expected = {32768: Figures(12.5, 20), 65536: Figures(50, 30.25), 131072: Figures(210.25, 40)}
    assert theirs == ("dense", expected)
    assert ours == [
        ("step, remat dots", {65536: Figures(12.5, 60.5), 32768: Figures(5, 60.5)}),
        ("step, remat full", {65536: Figures(20, 60.5)}),
    ]
    columns = [list(column.cells) for column in table([theirs, *ours]).columns]
    rows = list(zip(*columns, strict=True))
    assert [row[:2] for row in rows] == [
        ("32,768", "dense"),
        ("32,768", "step, remat dots"),
        ("65,536", "dense"),
        ("65,536", "step, remat dots"),
        ("65,536", "step, remat full"),
        ("131,072", "dense"),
    ]
    assert rows[3][2:] == ("12.50", "5,243", "60.5", "4.00", "2.00")
    assert rows[5][2:] == ("210.25", "623", "40.0", "1.00", "1.00")


def test_ratios_need_the_first_run(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([RECORD | {"memory_gib": 0.0}]))
    (tmp_path / "dense.log").write_text(LOG)
    columns = table(read_runs([tmp_path / "a.json", tmp_path / "dense.log"])).columns
    assert list(columns[5].cells) == ["", "1.00", "0.25", ""]
    assert list(columns[6].cells) == ["", "", "", ""]


def test_two_files_of_one_name_are_told_apart(tmp_path):
    paths = [tmp_path / folder / "run.log" for folder in "ab"]
    for path in paths:
        path.parent.mkdir()
        path.write_text(LOG)
    assert [run.name for run in read_runs(paths)] == [str(path) for path in paths]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.log", "step 1: loss 3.2\n", "no line of the efficiency test, such as"),
        ("x.json", "[", "not the figures of benchmarks/bench_step.py"),
        ("x.json", '[{"context": 3}]', "not the figures of benchmarks/bench_step.py: KeyError"),
        ("x.json", "[]", "holds no figures"),
    ],
)
def test_other_files_are_refused(name, text, message, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["efficiency", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_command_prints_and_draws(tmp_path, capsys):
    (tmp_path / "dense.log").write_text(LOG)
    picture = tmp_path / "new" / "picture.png"
    assert main(["efficiency", str(tmp_path / "dense.log"), "--plot", str(picture)]) == 0
    assert "210.25" in capsys.readouterr().out
    assert matplotlib.image.imread(picture).std() > 0
