"""Two training runs, loss against loss."""

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oomb_jax.show.config import Runs
from oomb_jax.train.metrics import EVALUATIONS, METRICS, read_records

LAST = 20
"""Steps at the end whose mean loss is compared: a single one hangs on its text."""


def show(settings: Runs, console: Console) -> int:
    """Prints the comparison; returns the exit status."""
    console.print(table(settings.directories, compare(*settings.directories)))
    return 0


def compare(first: Path, second: Path) -> dict[str, dict[str, float]]:
    """By measure: of both runs, at the last step that both have, and their relative difference.

    Raises:
      ValueError: a run has no step.
    """
    steps = [{r["step"]: r for r in read_records(run / METRICS)} for run in (first, second)]
    for run, records in zip((first, second), steps, strict=True):
        if not records:
            raise ValueError(f"{run}: no step in {METRICS}; give the directory of a run that has finished a step")
    common = sorted(set(steps[0]) & set(steps[1]))
    if not common:
        raise ValueError(f"{first} and {second}: no step in common; compare runs that began alike")
    last = common[-LAST:]
    rows = {
        f"training loss, steps {last[0]:,} to {last[-1]:,}": [[run[i]["loss"] for i in last] for run in steps],
        "tokens per second, median": [[run[i]["tokens_per_second"] for i in common] for run in steps],
    }
    middle = {name: statistics.median if "median" in name else statistics.fmean for name in rows}
    found = {name: _pair(*(middle[name](values) for values in both)) for name, both in rows.items()}
    held = [{r["step"]: r["loss"] for r in read_records(run / EVALUATIONS)} for run in (first, second)]
    if both := sorted(set(held[0]) & set(held[1])):
        found[f"held-out loss after step {both[-1]:,}"] = _pair(held[0][both[-1]], held[1][both[-1]])
    return found


def table(runs: tuple[Path, Path], rows: dict[str, dict[str, Any]]) -> Table:
    """The comparison for people."""
    result = Table("", *(str(run) for run in runs), "difference")
    for name, r in rows.items():
        digits = ",.0f" if "second" in name else ".4f"
        result.add_row(name, f"{r['first']:{digits}}", f"{r['second']:{digits}}", f"{r['difference']:+.2%}")
    return result


def _pair(first: float, second: float) -> dict[str, float]:
    return {"first": first, "second": second, "difference": second / first - 1}
