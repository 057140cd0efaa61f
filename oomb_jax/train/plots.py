"""The pictures and the summary of a run, from the files in its directory.

python -m oomb_jax.train.plots RUN_DIR
"""

import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from oomb_jax.train.metrics import EVALUATIONS, METRICS, RunFacts, read_records
from oomb_jax.train.progress import duration

if TYPE_CHECKING:  # matplotlib takes half a second to import: only where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

LOSS_PLOT = "loss.png"
MEMORY_PLOT = "memory.png"

# Three colours of the Okabe-Ito palette, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"
_GREY = "#6b6b6b"

Records = list[dict[str, Any]]


def draw(run_directory: str | os.PathLike[str]) -> list[Path]:
    """Draws `loss.png` and `memory.png` from `metrics.jsonl` and `evaluations.jsonl`; returns their paths.

    Raises:
        ValueError: where the directory holds no step to draw.
    """
    directory = Path(run_directory)
    steps, evaluations = _records(directory)
    facts = RunFacts.load(directory)
    title = f"{facts.model}, context {facts.context:,}" if facts else directory.resolve().name

    figure = _figure(2 if evaluations and evaluations[-1]["loss_by_position"] else 1)
    _draw_loss(figure.axes[0], steps, evaluations)
    if len(figure.axes) > 1:
        _draw_loss_by_position(figure.axes[1], evaluations)
    loss_path = _save(figure, title, directory / LOSS_PLOT)

    figure = _figure(1)
    _draw_memory(figure.axes[0], steps)
    return [loss_path, _save(figure, title, directory / MEMORY_PLOT)]


def summary(run_directory: str | os.PathLike[str]) -> Text:
    """One screen about a run: what it was, what came out, where its files lie, how to go on.

    Raises:
        ValueError: where the directory holds no step.
    """
    directory = Path(run_directory)
    steps, evaluations = _records(directory)
    facts = RunFacts.load(directory)
    last = steps[-1]
    rows: list[tuple[str, str]] = []
    if facts:
        rows.append(("model", f"{facts.model}, {facts.parameters:,} parameters, on {facts.device}"))
        rows.append(("context", f"{facts.context:,} tokens"))
    rows.append(("steps", f"{last['step']:,}" + (f" of {facts.steps:,}" if facts else "")))
    rows.append(("loss", f"{steps[0]['loss']:.4f} -> {last['loss']:.4f}"))
    if evaluations:
        first, newest = evaluations[0], evaluations[-1]
        since = f"{first['loss']:.4f} -> " if len(evaluations) > 1 else ""
        rows.append(("held-out loss", f"{since}{newest['loss']:.4f} (after step {newest['step']:,})"))
    if rates := _values(steps, "tokens_per_second")[1]:
        speed = f"{statistics.median(rates):,.0f} tokens/s (median)"
        if shares := _values(steps, "share_of_peak")[1]:
            speed += f", {statistics.median(shares):.1%} of the device's peak"
        rows.append(("speed", speed))
    memory = [
        f"{name} {max(values) / 2**30:.2f} GiB"
        for name, field in (("device", "device_memory_peak"), ("host", "host_memory"))
        if (values := _values(steps, field)[1])
    ]
    if memory:
        rows.append(("memory peak", ", ".join(memory)))
    if seconds := _values(steps, "seconds")[1]:
        rows.append(("time in steps", duration(sum(seconds))))
    files = [name for name in (METRICS, EVALUATIONS, LOSS_PLOT, MEMORY_PLOT) if (directory / name).exists()]
    rows.append(("files", f"{directory}: {', '.join(files)}"))
    if facts and facts.resume:
        rows.append(("go on with", facts.resume))
    return Text("\n".join(f"{name:>14}  {value}" for name, value in rows))


def _records(directory: Path) -> tuple[Records, Records]:
    steps = read_records(directory / METRICS)
    if not steps:
        raise ValueError(f"{directory}: no step in {METRICS}; give the directory of a run that has finished a step")
    return steps, read_records(directory / EVALUATIONS)


def _values(records: Sequence[dict[str, Any]], field: str) -> tuple[list[int], list[float]]:
    """Steps and values of a field where it is there and finite."""
    pairs = [(r["step"], float(r[field])) for r in records if r.get(field) is not None and math.isfinite(r[field])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _smooth(values: list[float], reach: int) -> list[float]:
    """Mean over `reach` values on either side, fewer near the ends: symmetric, so that it does not lag behind."""
    return [
        statistics.fmean(values[i - r : i + r + 1])
        for i in range(len(values))
        for r in [min(reach, i, len(values) - 1 - i)]
    ]


def _draw_loss(axes: "Axes", records: Records, evaluations: Records) -> None:
    steps, losses = _values(records, "loss")
    marker = "o" if len(steps) <= 30 else ""
    if len(steps) >= 60:
        axes.plot(steps, losses, color=_BLUE, alpha=0.3, linewidth=0.8)
        axes.plot(steps, _smooth(losses, len(steps) // 50), color=_BLUE, linewidth=1.8, label="training (smoothed)")
    else:
        axes.plot(steps, losses, color=_BLUE, linewidth=1.5, marker=marker, markersize=3, label="training")
    held_steps, held = _values(evaluations, "loss")
    if held:
        axes.plot(held_steps, held, color=_ORANGE, marker="o", markersize=5, linewidth=1.2, label="held out")
        text = f"{held[-1]:.3f}"
        axes.annotate(text, (held_steps[-1], held[-1]), (0, 8), textcoords="offset points", color=_ORANGE, ha="center")
    bad = [record["step"] for record in records if not math.isfinite(record["loss"])]
    for step in bad[:1]:
        axes.axvline(step, color=_GREY, linestyle="--", linewidth=1, label="loss not finite")
    # A loss in nats spans less than one decade in an ordinary run; a steep start would press the rest flat.
    every = losses + held
    if every and min(every) > 0 and max(every) > 8 * min(every):
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.legend(frameon=False)


def _draw_loss_by_position(axes: "Axes", evaluations: Records) -> None:
    newest = evaluations[-1]
    ends = newest["position_ends"]
    label = f"after step {newest['step']:,}"
    axes.stairs(newest["loss_by_position"], [0, *ends], baseline=None, color=_ORANGE, linewidth=1.8, label=label)
    if len(ends) > 2 and ends[-1] > 32 * ends[0]:
        # Positions that double from one bucket to the next; the first bucket begins at 0, which has no logarithm.
        axes.set_xscale("symlog", base=2, linthresh=ends[0])
    axes.set_xlim(0, ends[-1])
    axes.xaxis.set_major_formatter(lambda x, _: _tokens(x))
    axes.set(xlabel="position in the sequence (tokens)", ylabel="held-out loss (nats per token)")
    axes.legend(frameon=False)


def _tokens(count: float) -> str:
    """`128`, `16K`, `4M`: powers of 1024 where they are whole, as context lengths are told."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count / unit:.0f}{name}"
    return f"{count:,.0f}"


def _draw_memory(axes: "Axes", records: Records) -> None:
    lines = [
        ("device, peak", "device_memory_peak", _BLUE, "-"),
        ("device, in use", "device_memory_in_use", _BLUE, ":"),
        ("host", "host_memory", _ORANGE, "-"),
    ]
    if [r.get("device_memory_in_use") for r in records] == [r.get("host_memory") for r in records]:
        lines = [("host, peak", "device_memory_peak", _ORANGE, "-"), ("host, in use", "host_memory", _ORANGE, ":")]
    for label, field, color, style in lines:
        steps, values = _values(records, field)
        if values:
            gib = [value / 2**30 for value in values]
            axes.plot(steps, gib, style, color=color, linewidth=1.8, label=f"{label} ({max(gib):.2f} GiB)")
    axes.set(xlabel="step", ylabel="memory (GiB)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_whole_numbers())
    if axes.lines:
        axes.legend(frameon=False)


def _whole_numbers() -> "Locator":
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def _figure(panels: int) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * panels, 4.2), layout="constrained")
    for axes in figure.subplots(1, panels, squeeze=False)[0]:
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _save(figure: "Figure", title: str, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.suptitle(title, fontsize=11)
    temporary = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_figure(temporary, format="png", dpi=150)
    temporary.replace(path)
    return path


def main(arguments: Sequence[str]) -> int:
    """Draws the pictures of a run again and prints its summary; returns the exit status."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print("usage: python -m oomb_jax.train.plots RUN_DIR", file=sys.stderr)
        return 2
    try:
        draw(arguments[0])
        Console().print(summary(arguments[0]), soft_wrap=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
