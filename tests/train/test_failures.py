"""Runs that go wrong: no memory, a full disk, a loss that is no number. What is told, and that nothing is lost."""

import errno

import jax
import jax.numpy as jnp
import pytest

from oomb_jax.train import loop
from oomb_jax.train.__main__ import USAGE, main
from oomb_jax.train.checkpoint import CheckpointError, Checkpoints
from oomb_jax.train.metrics import MetricsWriter, read_records
from oomb_jax.train.step import Step
from tests.train.runs import flags


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(text, tmp_path, capsys):
    out = tmp_path / "run"
    status = main(flags(text, out, learning_rate=1e30, schedule="constant", clip=1e30, save_every=1))
    printed = capsys.readouterr().out
    assert status == loop.FAILED
    assert "step 2: the loss is nan in chunk 2 of 3 (tokens 256 to 299)" in printed
    assert "saved at step 1" in printed
    with Checkpoints(out / "checkpoints") as checkpoints:
        assert checkpoints.steps() == (1,)


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    update = Step.update

    def overflow(self, model, grads, state):
        factor = jnp.where(state.step == 1, jnp.inf, 1.0)
        return update(self, model, jax.tree.map(lambda g: g * factor, grads), state)

    monkeypatch.setattr(Step, "update", overflow)
    assert main(flags(text, out, save_every=1)) == loop.FAILED
    assert "step 2: the gradient's norm is nan; stopped; saved at step 1" in capsys.readouterr().out


def exhausted(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.\nmore")


def short(*_):
    raise MemoryError


@pytest.mark.parametrize(("failure", "reason"), [(exhausted, "RESOURCE_EXHAUSTED: Out of"), (short, "MemoryError;")])
def test_no_memory_at_the_start_is_told_in_one_line(text, tmp_path, capsys, monkeypatch, failure, reason):
    monkeypatch.setattr(loop, "create_pools", failure)
    assert main(flags(text, tmp_path / "run")) == USAGE
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: {reason}")
    assert "the run did not begin" in line
    assert not (tmp_path / "run" / "settings.json").exists()


def test_no_memory_in_a_step_ends_the_run_and_keeps_the_state(text, tmp_path, capsys, monkeypatch):
    out, gradients = tmp_path / "run", Step.gradients
    steps = []

    def second(self, *arguments, **more):
        steps.append(1)
        return gradients(self, *arguments, **more) if len(steps) == 1 else exhausted()

    monkeypatch.setattr(Step, "gradients", second)
    assert main(flags(text, out)) == loop.FAILED
    printed = " ".join(capsys.readouterr().out.split())
    assert "error: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.; stopped after step 1" in printed
    assert "saved at step 1" in printed


def test_an_error_in_a_running_step_saves_and_is_told(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    write = MetricsWriter.write

    def full(self, step, metrics):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        write(self, step, metrics)

    def no_pictures(directory):
        raise OSError(errno.ENOSPC, "No space left on device", "loss.png")

    monkeypatch.setattr(MetricsWriter, "write", full)
    monkeypatch.setattr(loop.plots, "draw", no_pictures)
    assert main(flags(text, out)) == loop.FAILED
    printed = capsys.readouterr().out
    assert "No space left on device: 'metrics.jsonl'; stopped after step 2; saved at step 2" in printed
    assert "warning: no pictures: [Errno 28] No space left on device: 'loss.png'" in printed


def test_a_save_that_fails_is_told_and_the_run_goes_on(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    save = Checkpoints.save

    def full(self, step, *args, **kwargs):
        if step == 2:
            raise CheckpointError("the disk is full")
        save(self, step, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", full)
    assert main(flags(text, out, save_every=1)) == 0
    assert "warning: not saved: the disk is full" in capsys.readouterr().out
    assert len(read_records(out / "metrics.jsonl")) == 4
    monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: (_ for _ in ()).throw(CheckpointError("full")))
    assert main([*flags(text, tmp_path / "never", save_every=1), "--export"]) == loop.FAILED
    assert (tmp_path / "never" / "model" / "model.safetensors").exists()
