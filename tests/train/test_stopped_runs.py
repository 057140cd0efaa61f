"""Whole runs that are stopped: killed, interrupted, and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from oomb_jax.train.__main__ import main, parse
from oomb_jax.train.metrics import read_records
from oomb_jax.train.step import Evaluation
from tests.train.runs import final_state, flags

SLOW_SAVE = """
import sys, time
from oomb_jax.train.__main__ import main
from oomb_jax.train.checkpoint import Checkpoints
save = Checkpoints.save
def slow(self, step, *args, **kwargs):
    if step > 2:
        self.wait()
        print("saving slowly", flush=True)
        time.sleep(60)
    save(self, step, *args, **kwargs)
Checkpoints.save = slow
sys.exit(main(sys.argv[1:]))
"""


class Process:
    """A run in a process of its own, to be stopped at a moment of its life."""

    def __init__(self, arguments: list[str], cache: Path, code: str | None = None):
        environment = os.environ | {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
        }
        program = ["-m", "oomb_jax.train"] if code is None else ["-c", code]
        command = [sys.executable, *program, *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_for(self, text: str) -> None:
        """Returns once a line of output holds `text`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if text in line:
                return
        raise AssertionError(f"the run ended without {text!r}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Sends a signal and waits; exit status and the rest of the output."""
        if number is not None:
            self.send(number)
        output, _ = self._process.communicate(timeout=120)
        return self._process.returncode, output


def test_a_step_without_room_for_its_gradients_ends_after_the_fill_pass_and_says_what_it_takes(text, tmp_path, capfd):
    settings = {"ctx": 600, "offload": 1, "pages": 1, "steps": 1, "save_every": 0}
    assert main(flags(text, tmp_path / "small", kv_grad_pages=1, **settings)) == 1
    said = re.search(
        r"kv_grad_pages=1: .* use --kv-grad-pages (\d+) or more, .*; stopped after step 0", capfd.readouterr().out
    )
    assert said is not None
    assert main(flags(text, tmp_path / "enough", kv_grad_pages=int(said[1]), **settings)) == 0


def test_killed_and_interrupted_runs_resume_bit_for_bit(text, tmp_path):
    """kill -9 after a save, SIGTERM inside a step, then resumed: parameters, optimizer and losses of a whole run."""
    cache = tmp_path / "cache"
    settings = {"steps": 40, "save_every": 5, "batch": 2, "weight_decay": 0.1, "warmup": 3}
    whole = tmp_path / "whole"
    process = Process(flags(text, whole, **settings), cache)
    assert process.end()[0] == 0

    out = tmp_path / "broken"
    process = Process(flags(text, out, **settings), cache)
    process.wait_for("step 12/40")
    assert process.end(signal.SIGKILL)[0] == -signal.SIGKILL
    process = Process([*flags(text, out, **settings), "--resume"], cache)
    process.wait_for("resumed from step 10")
    process.wait_for("step 17/40")
    time.sleep(0.02)
    status, output = process.end(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM: stopped after step" in output
    assert "go on with" in output
    process = Process([*flags(text, out, **settings), "--resume"], cache)
    assert process.end()[0] == 0

    assert final_state(out) == final_state(whole)
    assert not parse(["--config", str(out / "settings.json")]).resume
    losses = [[(r["step"], r["loss"]) for r in read_records(d / "metrics.jsonl")] for d in (out, whole)]
    assert losses[0] == losses[1]


def test_an_interrupted_last_evaluation_is_made_when_the_run_is_resumed(text, tmp_path, capfd, monkeypatch):
    out = tmp_path / "run"
    losses = Evaluation.losses

    def interrupted(self, model, pools, batch, report):
        if (out / "metrics.jsonl").read_text().count("\n") == 4:
            signal.raise_signal(signal.SIGTERM)
        return losses(self, model, pools, batch, report)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, "losses", interrupted)
        assert main(flags(text, out)) == 128 + signal.SIGTERM
    told = capfd.readouterr()
    assert "SIGTERM: stopped after step 4; saved at step 4; go on with" in told.out
    assert "SIGTERM: the run ends after this chunk; once more ends it now" in told.err
    assert [e["step"] for e in read_records(out / "evaluations.jsonl")] == [0]
    beat = json.loads((out / "heartbeat.json").read_text())
    assert (beat["pass"], beat["step"], beat["status"]) == ("ended", 4, 128 + signal.SIGTERM)
    for _ in range(2):  # and only once
        assert main([*flags(text, out), "--resume"]) == 0
        assert [e["step"] for e in read_records(out / "evaluations.jsonl")] == [0, 4]


def test_a_second_ctrl_c_ends_the_run_at_once_and_the_last_checkpoint_is_whole(text, tmp_path):
    out = tmp_path / "run"
    process = Process(flags(text, out, steps=100, save_every=2), tmp_path / "cache", code=SLOW_SAVE)
    process.wait_for("step   3/100")
    process.send(signal.SIGINT)
    process.wait_for("SIGINT: the run ends after this chunk; once more ends it now")
    process.wait_for("saving slowly")
    begun = time.monotonic()
    status, _ = process.end(signal.SIGINT)
    assert status == -signal.SIGINT
    assert time.monotonic() - begun < 10
    assert final_state(out)["step"] == 2
    assert json.loads((out / "heartbeat.json").read_text())["pass"] in ("fill", "reverse", "evaluate")
