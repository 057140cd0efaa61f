"""What a run shows while it lasts: progress, time left, heartbeat."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from oomb_jax.train.heartbeat import Heartbeat
from oomb_jax.train.progress import Pass, Progress, StepClock, duration, step_line


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("slope", "ratio", "sequences"), [(0.0, 2.5, 1), (8.0, 3.4, 1), (40.0, 3.0, 3)])
def test_time_left_in_a_step_whose_chunks_get_slower(slope, ratio, sequences):
    n, compile_seconds = 64, 20.0
    noise = np.random.default_rng(int(slope))
    fill = [(1 + slope * (i + 0.5) / n) * noise.uniform(0.98, 1.02) for i in range(n)]
    passes: list[tuple[Pass, list[float]]] = [("fill", fill), ("reverse", [ratio * x for x in fill[::-1]])]
    clock, now = StepClock(), 50.0
    errors: dict[tuple[int, str, int], float] = {}
    for step in range(2):
        pieces: list[tuple[Pass, int, int, float]] = [
            (name, i, sequence, cost)
            for sequence in range(sequences)
            for name, costs in passes
            for i, cost in enumerate(costs, 1)
        ]
        if step == 0:
            pieces[0] = ("fill", 1, 0, fill[0] + compile_seconds)
        clock.start(now)
        assert (clock.left(now) is None) == (step == 0)
        left = whole = sum(piece[-1] for piece in pieces)
        for name, i, sequence, cost in pieces:
            now, left = now + cost, left - cost
            clock.chunk(name, i / n, now, sequences - 1 - sequence)
            estimate = clock.left(now)
            assert estimate is not None
            if sequence == 0:
                errors[step, name, i] = (estimate - left) / whole
            if i < n - 1:
                assert clock.left(now + 0.5) == pytest.approx(estimate - 0.5)
        assert clock.left(now) == pytest.approx(0.0, abs=1e-6)
        clock.finish(now)
    # In the first step the fill pass knows nothing yet of the reverse pass's cost, and its compilation is in `whole`.
    assert max(abs(errors[0, "fill", i]) for i in range(n // 2, n + 1)) < 0.25
    assert max(abs(errors[0, "reverse", i]) for i in range(8, n + 1)) < 0.05
    assert max(abs(errors[1, "fill", i]) for i in range(4, n + 1)) < 0.1
    assert max(abs(errors[1, "reverse", i]) for i in range(4, n + 1)) < 0.05


def test_plain_progress_is_lines_of_text():
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=False, width=60)
    passes: tuple[tuple[Pass, float], ...] = (("fill", 2.0), ("reverse", 6.0))
    with Progress(console, 3, clock=clock) as progress:
        for step in (1, 2, 3):
            progress.step(step)
            for name, seconds in passes:
                for done in range(1, 11):
                    clock.now += seconds
                    progress.chunk(name, done, 10, sequence=1, sequences=2)
            progress.finish_step({"loss": 2.5 / step, "tokens_per_second": 12345.6, "seconds": 80.0}, log=step != 2)
            clock.now += 10.0  # an evaluation
    lines = out.getvalue().splitlines()
    assert out.getvalue().replace("\n", "").isprintable()
    assert [line for line in lines if "chunks" not in line] == [
        "step 1/3  loss 2.5000  12,346 tokens/s  80.0 s  left 2:40",
        "step 3/3  loss 0.8333  12,346 tokens/s  80.0 s",
    ]
    inside = [line for line in lines if "chunks" in line]
    assert len(inside) == 6  # two in each step of 80 seconds
    assert inside[0].startswith("step 1/3  sequence 1/2  reverse 2/10 chunks  0:32 in step  ~")
    assert "loss 2.5000" in inside[2]


def test_run_time_left_counts_what_happens_between_steps():
    clock, out = Clock(), io.StringIO()
    progress = Progress(Console(file=out, width=200), 10, clock=clock)
    for step in range(1, 5):
        progress.step(step)
        clock.now += 60.0 if step == 1 else 20.0  # the first compiles
        progress.finish_step({"loss": 1.0})
        clock.now += 5.0
    # Steps 2 to 4 finish 25 seconds apart; 6 are left.
    assert out.getvalue().splitlines()[-1] == "step  4/10  loss 1.0000  left 2:30"


def test_an_evaluation_is_shown_and_no_part_of_the_estimate():
    clock, out = Clock(), io.StringIO()
    progress = Progress(Console(file=out, width=200), 10, clock=clock)
    progress.evaluation(0)
    for done in range(1, 5):
        clock.now += 20.0
        progress.chunk("evaluate", done, 4, sequence=2, sequences=3)
    progress.step(1)
    assert out.getvalue().splitlines() == [
        f"step 0/10  sequence 2/3  evaluate {done}/4 chunks  {told} in evaluation"
        for done, told in ((2, "0:40"), (4, "1:20"))
    ]
    clock.now += 8.0
    progress.chunk("fill", 4, 4)
    still = io.StringIO()
    Console(file=still, width=200).print(progress)
    assert "~0:24 left in step" in still.getvalue()  # three times the fill pass


def test_a_heartbeat_is_whole_rare_and_no_reason_to_stop(tmp_path):
    clock, warnings = Clock(), []
    heartbeat = Heartbeat(tmp_path, warnings.append, clock=lambda: clock.now)
    path, seen = tmp_path / "heartbeat.json", []
    heartbeat.end(2, 0)
    heartbeat.begin(2)
    assert json.loads(path.read_text()) == {"time": clock.now, "step": 2, "pass": "begun"}
    for chunk in range(1, 8):
        heartbeat.beat(3, "fill", chunk=chunk, chunks=8)
        seen.append(json.loads(path.read_text()))
        clock.now += 2.0
    assert [beat["chunk"] for beat in seen] == [1, 1, 1, 4, 4, 4, 7]
    assert seen[-1] == {"time": clock.now - 2.0, "step": 3, "pass": "fill", "chunk": 7, "chunks": 8}
    clock.now -= 3600.0
    heartbeat.beat(3, "fill", chunk=8, chunks=8)
    assert json.loads(path.read_text())["chunk"] == 8
    heartbeat.end(3, 143)
    assert json.loads(path.read_text()) == {"time": clock.now, "step": 3, "pass": "ended", "status": 143}
    assert [p.name for p in tmp_path.iterdir()] == ["heartbeat.json"]
    gone = Heartbeat(tmp_path / "gone", warnings.append, clock=lambda: clock.now)
    for _ in range(2):
        gone.beat(1, "fill")
        clock.now += 6.0
    assert len(warnings) == 1
    assert "cannot be written (No such file or directory)" in warnings[0]


@pytest.mark.parametrize("width", [50, 160])
def test_live_progress_is_one_line_within_the_width(width):
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=True, width=width)
    with Progress(console, 12, live=True, clock=clock) as progress:
        progress.step(3)
        clock.now += 4
        progress.chunk("fill", 2, 8)
        still = io.StringIO()
        Console(file=still, width=width).print(progress)
        console.print("a message above")
        progress.finish_step({"loss": 1.25})
    (line,) = still.getvalue().splitlines()
    assert len(line) <= width
    assert "step 3/12  fill 2/8 chunks  0:04 in step" in line
    # The step: 12 s of the fill pass and 3 * 16 s of the reverse pass; the run: 9 steps of 64 s more.
    assert ("~1:00 left in step  ~10:36 in run" in line) == (width == 160)
    assert "a message above" in out.getvalue()
    assert "step  3/12  loss 1.2500" in out.getvalue()


def test_line_of_a_step_shows_what_is_known():
    values = {
        "loss": jnp.float32(math.nan),
        "learning_rate": 3e-4,
        "share_of_peak": None,
        "device_memory_peak": 3 << 29,
    }
    assert step_line(7, 1000, values) == "step    7/1000  loss nan  lr 3.00e-04  peak 1.50 GiB"
    seconds = (0.4, 59.6, 3599.4, 3600.0, 90061.0)
    assert [duration(x) for x in seconds] == ["0:00", "1:00", "59:59", "1:00:00", "1d 01:01:01"]
