"""The live line of a run: step, pass, chunks done, time left. Plain lines where nobody watches."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Pass = Literal["fill", "reverse"]

# The reverse pass computes a chunk forward again and then backward, which costs about twice the forward.
# Used only until a reverse pass of this run has been measured.
_REVERSE_OVER_FILL = 3.0

# Seconds between plain lines inside a long step.
_PLAIN_EVERY = 30.0


class StepClock:
    """Estimates how long a step still takes that runs a fill pass and a reverse pass over each of its sequences.

    In the fill pass chunk i of n is taken to cost `1 + slope * i / n`: a constant part and the attention to what lies
    before it. `slope` is fitted to the chunks that have run. The reverse pass goes the same way back, `ratio` times as
    dear; the ratio is measured as soon as reverse chunks have run. What is learnt in one step serves the next.
    Times are seconds of the caller's clock.
    """

    def __init__(self):
        """Nothing is known yet: chunks of equal cost."""
        self._slope = 0.0
        self._ratio = _REVERSE_OVER_FILL
        self._last_step: float | None = None
        self.start(0.0)

    def start(self, now: float) -> None:
        """A step begins."""
        self._begun = now
        self._pass: Pass | None = None
        self._sequences_left = 0
        self._fill_cost: float | None = None
        self._marks = [(0.0, now)]  # (fraction of the pass, time)

    def chunk(self, name: Pass, fraction: float, now: float, sequences_left: int = 0) -> None:
        """`fraction` of the chunks of pass `name` are done; after this sequence `sequences_left` more follow."""
        if name != self._pass:
            self._fill_cost = self._cost() if self._pass == "fill" and len(self._marks) > 1 else None
            self._marks = [(0.0, self._marks[-1][1])]
        self._pass, self._sequences_left = name, sequences_left
        if fraction > self._marks[-1][0]:
            self._marks.append((fraction, now))
            if name == "fill":
                self._fit_slope()
            elif self._fill_cost:
                self._ratio = self._cost() / self._fill_cost

    def finish(self, now: float) -> None:
        """The step is done."""
        self._last_step = now - self._begun

    def left(self, now: float) -> float | None:
        """Seconds to the end of the step; None while there is nothing to tell it from."""
        if len(self._marks) == 1:
            return None if self._last_step is None else max(self._last_step - (now - self._begun), 0.0)
        cost = self._cost()
        fraction, time_of_mark = self._marks[-1]
        fill, reverse = (cost, cost * self._ratio) if self._pass == "fill" else (cost / self._ratio, cost)
        pass_left = max(cost * (1.0 - self._share(fraction)) - (now - time_of_mark), 0.0)
        return pass_left + (reverse if self._pass == "fill" else 0.0) + self._sequences_left * (fill + reverse)

    def _cost(self) -> float:
        """Seconds of the whole pass at its pace so far, its first piece left out where it can be: it may compile."""
        (first, begun), (last, now) = self._marks[1 if len(self._marks) > 2 else 0], self._marks[-1]
        return max(now - begun, 1e-9) / (self._share(last) - self._share(first))

    def _share(self, fraction: float) -> float:
        """Part of the pass's cost that its first `fraction` of chunks takes."""
        if self._pass == "reverse":
            return 1.0 - self._fill_share(1.0 - fraction)
        return self._fill_share(fraction)

    def _fill_share(self, fraction: float) -> float:
        return (fraction + self._slope * fraction**2 / 2) / (1.0 + self._slope / 2)

    def _fit_slope(self) -> None:
        fraction, seconds = np.asarray(self._marks[1:]).T
        # With fewer points, or from the start of a pass alone, the fit follows the noise.
        if len(fraction) < 8 or fraction[-1] < 0.25:
            return
        design = np.stack([np.ones_like(fraction), fraction, fraction**2 / 2], axis=1)
        _, constant, growth = np.linalg.lstsq(design, seconds - seconds[0], rcond=None)[0]
        # Noise may turn either part negative; a chunk never gets cheaper with its position.
        self._slope = float(np.clip(growth / constant, 0.0, 1e3)) if constant > 0 else 1e3


@dataclasses.dataclass(frozen=True)
class _State:
    """What the line shows, replaced as a whole since the drawing thread reads it."""

    step: int
    where: str = ""
    done: int = 0
    total: int = 0
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluating: bool = False


class Progress:
    """Shows the progress of a run; use it as a context manager.

        with Progress(console, total_steps) as progress:
            for step in range(first, total_steps + 1):
                progress.step(step)
                progress.chunk("fill", 3, 64)          # as chunks get done
                progress.finish_step(metrics)

    On a terminal one line at the bottom is redrawn, and what is printed through `console` meanwhile goes above it.
    Elsewhere there are plain lines: one per finished step that is logged and, in a long step, one every half minute.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Nothing is shown before the context is entered.

        Args:
            console: where to show it.
            total_steps: number of the last step.
            live: redraw a line; None: where the console is a terminal.
            clock: seconds, for tests.
        """
        if live is None:
            # A console can be told to use colours in a file; a line redrawn there would be rubbish.
            live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._console = console
        self._total_steps = total_steps
        self._clock = clock
        self._lock = threading.Lock()
        self._step_clock = StepClock()
        self._state: _State | None = None
        self._step_begun = self._last_line = clock()
        self._finished: list[float] = []
        self._first_seconds = 0.0
        self._live = Live(self, console=console, refresh_per_second=4, transient=True) if live else None

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, step: int) -> None:
        """Step number `step` begins, the first being 1."""
        with self._lock:
            self._step_begun = self._last_line = self._clock()
            self._step_clock.start(self._step_begun)
            self._state = _State(step, metrics=self._state.metrics if self._state else {})

    def evaluation(self, step: int) -> None:
        """An evaluation after `step` steps begins."""
        with self._lock:
            self._step_begun = self._last_line = self._clock()
            self._state = _State(step, metrics=self._state.metrics if self._state else {}, evaluating=True)

    def chunk(
        self, name: Pass | Literal["evaluate"], done: int, total: int, *, sequence: int = 1, sequences: int = 1
    ) -> None:
        """`done` of `total` chunks of the pass over sequence `sequence` of the batch are computed, not just sent."""
        if self._state is None:
            raise RuntimeError("chunk() before step() or evaluation(): nothing has begun")
        with self._lock:
            now = self._clock()
            if name != "evaluate":
                self._step_clock.chunk(name, done / total, now, sequences - sequence)
            where = f"sequence {sequence}/{sequences}  " if sequences > 1 else ""
            self._state = dataclasses.replace(self._state, where=f"{where}{name}", done=done, total=total)
            if self._live is not None or now - self._last_line < _PLAIN_EVERY:
                return
            self._last_line = now
            line = "  ".join(self._fields(now))
        self._print(line)

    def finish_step(self, metrics: Mapping[str, Any], *, log: bool = True) -> None:
        """The step is done; with `log` its line stays on the screen. `metrics` is what goes to `metrics.jsonl`."""
        if self._state is None:
            raise RuntimeError("finish_step() before step(): no step has begun")
        with self._lock:
            now = self._clock()
            self._step_clock.finish(now)
            if not self._finished:
                self._first_seconds = now - self._step_begun
            self._finished.append(now)
            self._state = _State(self._state.step, metrics=dict(metrics))
            line = step_line(self._state.step, self._total_steps, metrics)
            left = self._run_left(now)
        if log:
            self._print(line + (f"  left {duration(left)}" if left else ""))

    def __rich__(self) -> Table:
        """The live line, drawn again with every refresh."""
        with self._lock:
            state, fields = self._state, self._fields(self._clock())
        line = Text("  ".join(fields), no_wrap=True, overflow="ellipsis")
        table = Table.grid(padding=(0, 1))
        if state is None or state.total == 0 or self._console.width < 110:
            table.add_column(no_wrap=True, overflow="ellipsis")
            table.add_row(line)
        else:
            table.add_column()
            table.add_column(no_wrap=True, overflow="ellipsis")
            table.add_row(ProgressBar(total=state.total, completed=state.done, width=16), line)
        return table

    def _fields(self, now: float) -> list[str]:
        state = self._state
        if state is None:
            return ["starting"]
        fields = [f"step {state.step}/{self._total_steps}"]
        if state.total:
            fields.append(f"{state.where} {state.done}/{state.total} chunks")
        if state.evaluating:
            return [*fields, f"{duration(now - self._step_begun)} in evaluation"]
        fields.append(f"{duration(now - self._step_begun)} in step")
        finished = bool(self._finished) and self._finished[-1] >= self._step_begun
        step_left = None if finished else self._step_clock.left(now)
        if step_left is not None:
            fields.append(f"~{duration(step_left)} left in step")
        run_left = self._run_left(now)
        if run_left is not None and state.step < self._total_steps:
            fields.append(f"~{duration(run_left)} in run")
        if "loss" in state.metrics:
            fields.append(f"loss {float(state.metrics['loss']):.4f}")
        if "tokens_per_second" in state.metrics:
            fields.append(f"{_rate(state.metrics['tokens_per_second'])} tokens/s")
        return fields

    def _run_left(self, now: float) -> float | None:
        """Seconds to the end of the run, from the wall time between finished steps: evaluations and saves are in it."""
        if self._state is None:
            return None
        remaining = self._total_steps - self._state.step
        finished = bool(self._finished) and self._finished[-1] >= self._step_begun
        current = 0.0 if finished else self._step_clock.left(now)
        if current is None:
            return None
        if len(self._finished) > 1:
            # The first step is left out: it compiles.
            per_step = (self._finished[-1] - self._finished[0]) / (len(self._finished) - 1)
        elif self._finished:
            per_step = self._first_seconds
        else:
            per_step = now - self._step_begun + current
        return current + remaining * per_step

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def step_line(step: int, total_steps: int, metrics: Mapping[str, Any]) -> str:
    """One line about a finished step, from the fields of `metrics.jsonl` that are there."""
    width = len(str(total_steps))
    fields = [f"step {step:{width}d}/{total_steps}"]
    formats: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("loss", lambda x: f"loss {x:.4f}"),
        ("learning_rate", lambda x: f"lr {x:.2e}"),
        ("gradient_norm", lambda x: f"grad {x:.3g}"),
        ("tokens_per_second", lambda x: f"{_rate(x)} tokens/s"),
        ("share_of_peak", lambda x: f"{x:.1%} of peak"),
        ("device_memory_peak", lambda x: f"peak {x / 2**30:.2f} GiB"),
        ("distinct_pages", lambda x: f"{x:,.0f} distinct pages"),
        ("attention_share", lambda x: f"{x:.1%} of attention"),
        ("recall", lambda x: f"recall {x:.1%}"),
        ("seconds", lambda x: f"{x:.1f} s"),
    )
    fields += [show(float(metrics[name])) for name, show in formats if metrics.get(name) is not None]
    return "  ".join(fields)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:04:05` or `2d 03:04:05`."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def _rate(x: Any) -> str:
    return f"{float(x):,.0f}" if float(x) >= 100 else f"{float(x):.3g}"
