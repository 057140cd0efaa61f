"""Time and memory by context: the lines of the PyTorch implementation's efficiency test beside our figures."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.table import Table

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINES = (
    re.compile(r"avg time: (?P<seconds>[\d.]+) \| max memory: (?P<mib>[\d.]+) \| seq len: +(?P<context>\d+)"),
    # The row that the test makes of these figures; as published it does not print it.
    re.compile(r"(?<![\d.|])(?P<context>\d+)\s*\|\s*(?P<seconds>[\d.]+)\s*\|\s*(?P<mib>[\d.]+)\s*$"),
)
_FIGURES = ("context", "seconds", "tokens_per_second", "share_of_peak", "memory_gib", "compile_seconds")
_TOLD = ("profile", "distinct_pages", "gigabytes", "gradient_pages")
_NO_SETTING = (*_FIGURES, *_TOLD, "device", "jax", "date", "steps")


class Figures(NamedTuple):
    """One forward and backward pass."""

    seconds: float
    gib: float
    """Peak of the allocator on one GPU; 0 where it has none."""


class Run(NamedTuple):
    """Figures of one program and its settings."""

    name: str
    by_context: dict[int, Figures]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs from files: a log of the efficiency test holds one, JSON of benchmarks/bench_step.py one for each setting.

    Every GPU of a run with tensor parallelism prints a line; of several for one context the largest figures count.

    Raises:
      ValueError: a file holds none.
    """
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        text = path.read_text(encoding="utf-8")
        runs += _from_json(path, name, text) if path.suffix == ".json" else [_from_log(path, name, text)]
    return runs


def table(runs: Sequence[Run]) -> Table:
    """A row for each context and run, with its speed and memory over those of the first run."""
    result = Table("context", "run")
    for column in ("time (s)", "tokens/s", "memory (GiB)", "speed ratio", "memory ratio"):
        result.add_column(column, justify="right")
    for context in sorted({context for run in runs for context in run.by_context}):
        first = runs[0].by_context.get(context)
        result.add_section()
        for run in runs:
            if figures := run.by_context.get(context):
                plain = f"{figures.seconds:,.2f}", f"{context / figures.seconds:,.0f}", f"{figures.gib:.1f}"
                speed = f"{first.seconds / figures.seconds:.2f}" if first else ""
                memory = f"{figures.gib / first.gib:.2f}" if first and first.gib else ""
                result.add_row(f"{context:,}", run.name, *plain, speed, memory)
    return result


def draw(runs: Sequence[Run]) -> Figure:
    """Left, time by context; right, memory by context."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, key, title in zip(figure.subplots(1, 2), Figures._fields, ("seconds", "peak memory (GiB)"), strict=True):
        for run in runs:
            points = sorted(run.by_context.items())
            axes.plot([x for x, _ in points], [getattr(y, key) for _, y in points], marker="o", label=run.name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
        axes.set_xlabel("tokens in the sequence")
        axes.set_ylabel(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    left, right = figure.axes
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    left.yaxis.set_minor_locator(NullLocator())
    right.set_ylim(bottom=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8)
    return figure


def _from_log(path: Path, name: str, text: str) -> Run:
    found: dict[int, Figures] = {}
    for match in _matches(text):
        figures = Figures(float(match["seconds"]), float(match["mib"]) / 1024)
        known = found.get(int(match["context"]), figures)
        found[int(match["context"])] = Figures(*map(max, figures, known))
    if not found:
        raise ValueError(
            f"{path}: no line of the efficiency test, such as 'step-1 | loss: 0.000 | avg time: 76.123 | max memory: "
            "33900.125 | seq len: 65536'; figures of benchmarks/bench_step.py end in .json"
        )
    return Run(name, found)


def _matches(text: str) -> Iterator[re.Match[str]]:
    for line in text.splitlines():
        plain = _COLOUR.sub("", line)
        yield from (match for pattern in _LINES if (match := pattern.search(plain)))


def _from_json(path: Path, name: str, text: str) -> list[Run]:
    try:
        records = json.loads(text)
        settings = [{key: record[key] for key in record if key not in _NO_SETTING} for record in records]
        figures = [(x["context"], Figures(float(x["seconds"]), float(x["memory_gib"]))) for x in records]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the figures of benchmarks/bench_step.py: {error!r}") from None
    runs: dict[str, dict[int, Figures]] = {}
    for about, (context, one) in zip(settings, figures, strict=True):
        label = ", ".join([name, *_distinct(about, settings)])
        runs.setdefault(label, {})[context] = one
    if not runs:
        raise ValueError(f"{path}: holds no figures")
    return [Run(*run) for run in runs.items()]


def _distinct(about: dict[str, Any], settings: Sequence[dict[str, Any]]) -> list[str]:
    """The settings of a record that another one has otherwise."""
    return [f"{key} {value}" for key, value in about.items() if any(other.get(key) != value for other in settings)]
