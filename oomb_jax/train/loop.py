"""The training loop: steps, evaluations, checkpoints, and an orderly end whatever ends it."""

import contextlib
import dataclasses
import functools
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console

from oomb_jax import models
from oomb_jax.pools import Pools, create_pools
from oomb_jax.shapes import IGNORE
from oomb_jax.train import metrics, plots
from oomb_jax.train.checkpoint import CheckpointError, Checkpoints
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.data import copy_tokenizer, evaluation_batch, longest, sample
from oomb_jax.train.heartbeat import Heartbeat
from oomb_jax.train.progress import Progress
from oomb_jax.train.setup import EXPORTED, Run, check_directory, create_model, metadata, prepare
from oomb_jax.train.signals import Interrupted, Signals
from oomb_jax.train.step import Evaluation

DONE, FAILED = 0, 1


class NonFinite(Exception):
    """The loss or the gradient is not a number. The message says where."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """The state of a run: `step` optimizer steps are in `model` and `optimizer`."""

    step: int
    model: Any
    optimizer: Any
    pools: Pools | None
    saved: int | None
    """The step of the latest checkpoint."""

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model, "optimizer": self.optimizer}


def train(settings: TrainConfig, console: Console) -> int:
    """Runs to the end of `settings.steps`, or until a signal, a loss that is not finite, or an error.

    Returns:
      The exit status: 0; 1 where the run could not go on or could not save; 128 + the signal where one ended it.
    """
    check_directory(settings)
    with Signals() as signals:
        with before_the_first_step():
            run = prepare(settings, lambda text: console.print(text, highlight=False, soft_wrap=True))
        directory = run.settings.directory
        with Checkpoints(directory / "checkpoints", keep=run.settings.keep) as checkpoints:
            with before_the_first_step():
                training = start(run, checkpoints, console)
            if training.step < run.settings.steps:
                run.settings.save(directory / "settings.json")
            else:  # what the settings say of the steps that were made stays true
                console.print(f"all {run.settings.steps} steps are done; raise --steps to go on", highlight=False)
            facts(run).save(directory)
            resumed = training.step if run.settings.resume else None
            with (
                metrics.MetricsWriter(
                    directory, resumed_step=resumed, tensorboard=settings.tensorboard, wandb=settings.wandb
                ) as writer,
                Progress(console, run.settings.steps) as progress,
            ):
                heartbeat = Heartbeat(directory, lambda text: console.print(text, soft_wrap=True))
                heartbeat.begin(training.step)
                status = Loop(run, training, checkpoints, writer, progress, heartbeat, signals, console).run()
                # Also where the last checkpoint failed: the disk may hold the model alone.
                if run.settings.export and training.step == run.settings.steps and status in (DONE, FAILED):
                    status = max(status, export(run, training, console))
                heartbeat.end(training.step, status)
        if training.step > 0:
            try:
                plots.draw(directory)
            except OSError as error:
                console.print(f"warning: no pictures: {error}", highlight=False, soft_wrap=True)
            console.print(plots.summary(directory), soft_wrap=True)
        return status


@contextlib.contextmanager
def before_the_first_step() -> Iterator[None]:
    """Raises ValueError, for people, where JAX or Python finds no memory; in a step `Loop` ends the run."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{reason}; the run did not begin. If memory is short though the plan fitted, something else holds it "
            "(nvidia-smi, free -g): end that, or take less (--ctx, --offload)"
        ) from error


def export(run: Run, training: Training, console: Console) -> int:
    """Writes the trained model as a Hugging Face directory, with its tokenizer; returns the exit status."""
    directory = run.settings.directory / EXPORTED
    try:
        models.save(training.model, directory)
        copy_tokenizer(run.settings.tokenizer or "bytes", directory)
    except OSError as error:
        way_out = f"; write it with: {resume_command(run.settings)}" if training.saved == training.step else ""
        console.print(f"error: not exported: {error}{way_out}", highlight=False, soft_wrap=True)
        return FAILED
    return DONE


def start(run: Run, checkpoints: Checkpoints, console: Console) -> Training:
    """A new run, or the latest checkpoint of an old one."""
    latest = checkpoints.latest()
    if not run.settings.resume:
        model = create_model(run)
        return Training(step=0, model=model, optimizer=run.optimizer.init(model), pools=_pools(run), saved=None)
    abstract = {"model": run.model, "optimizer": run.state}
    about = metadata(run)
    state, saved = checkpoints.restore(abstract, expect={"model": about["model"]})
    assert latest is not None
    console.print(f"resumed from step {latest}", highlight=False)
    differences = run.settings.differences(saved["settings"])
    ignored = {
        "resume",
        "config",
        "out",
        "log_every",
        "save_every",
        "keep",
        "export",
        "eval_every",
        "tensorboard",
        "wandb",
    }
    for name, (before, now) in differences.items():
        if name not in ignored:
            console.print(f"note: {name} was {before}, now {now}", highlight=False, soft_wrap=True)
    return Training(step=latest, model=state["model"], optimizer=state["optimizer"], pools=_pools(run), saved=latest)


@dataclasses.dataclass(eq=False)
class Loop:
    """The steps of a run, and what is done between them."""

    run_: Run
    training: Training
    checkpoints: Checkpoints
    writer: metrics.MetricsWriter
    progress: Progress
    heartbeat: Heartbeat
    signals: Signals
    console: Console

    @functools.cached_property
    def evaluation(self) -> Evaluation:
        """Compiled at its first use, once."""
        return Evaluation(config=self.run_.step.config)

    def run(self) -> int:
        """See `train`."""
        settings, training = self.run_.settings, self.training
        try:
            if self.evaluation_due() and not self.evaluated():
                self.evaluate()
            while training.step < settings.steps:
                self.one_step()
                loss = self.evaluate() if self.evaluation_due() else None
                last = training.step == settings.steps
                if settings.save_every and (last or training.step % settings.save_every == 0):
                    self.save(loss)
        except Interrupted as interrupted:
            self.save(None)
            self.say(f"{interrupted}: stopped after step {training.step}; {self.standing()}")
            return 128 + interrupted.number
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:  # a full disk, damaged data, no memory
            # An update that failed half way has taken the old state with it.
            if not any(x.is_deleted() for x in jax.tree.leaves(training.state)):
                self.save(None)
            reason = str(error).splitlines()[0]
            self.say(f"error: {reason}; stopped after step {training.step}; {self.standing()}")
            return FAILED
        except NonFinite as error:
            self.say(f"error: {error}; stopped; {self.standing()}")
            return FAILED
        return self.settle()

    def one_step(self) -> None:
        """A batch, its gradient, the update, and the line about it."""
        run, training, settings = self.run_, self.training, self.run_.settings
        number = training.step + 1
        begun = time.monotonic()
        batch = sample(
            run.data.train, seed=settings.seed, step=training.step, batch=settings.batch, ctx=settings.ctx,
            pack=settings.pack,
        )  # fmt: skip
        self.progress.step(number)
        losses, grads, training.pools = run.step.gradients(training.model, self.take_pools(), batch, self.report)
        self.signals.check()
        self.wait_for_save()
        training.model, training.optimizer, stats = run.step.update(training.model, grads, training.optimizer)
        del grads
        norm, rate = (float(x) for x in jax.device_get((stats["gradient_norm"], stats["learning_rate"])))
        if not math.isfinite(norm):
            raise NonFinite(f"step {number}: the gradient's norm is {norm}")
        training.step = number
        seconds = time.monotonic() - begun
        choice = run.step.selection(training.pools)
        share = choice.get("attention_share", 1.0)
        line = self.measurements(float(losses.sum()), norm, rate, seconds, share) | choice
        self.writer.write(number, line)
        self.progress.finish_step(line, log=number % settings.log_every == 0 or number == settings.steps)

    def report(
        self,
        name: Literal["fill", "reverse", "evaluate"],
        done: int,
        total: int,
        sequence: int,
        loss: float | None,
        *,
        earlier: int = 0,
    ) -> None:
        """Called for every computed chunk: shows it, and ends the step where there is reason to. Of an evaluation
        `earlier` sequences are done."""
        settings, step = self.run_.settings, self.training.step
        batches = settings.eval_batches if name == "evaluate" else 1
        which = {"sequence": earlier + sequence + 1, "sequences": batches * settings.batch}
        self.progress.chunk(name, done, total, **which)
        self.heartbeat.beat(step if name == "evaluate" else step + 1, name, chunk=done, chunks=total, **which)
        if loss is not None and not math.isfinite(loss):
            chunk, length = total - done, self.run_.step.config.chunk
            raise NonFinite(
                f"step {self.training.step + 1}: the loss is {loss} in chunk {chunk} of {total} "
                f"(tokens {chunk * length:,} to {min((chunk + 1) * length, self.run_.settings.ctx) - 1:,})"
            )
        self.signals.check()

    def measurements(
        self, loss: float, norm: float, rate: float, seconds: float, attention_share: float
    ) -> dict[str, Any]:
        """The line of a step in metrics.jsonl."""
        run = self.run_
        tokens = run.settings.batch * run.settings.ctx
        flops = run.settings.batch * step_flops(run, attention_share) / seconds
        line = {
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "model_flops_per_second": flops,
            "host_memory": metrics.host_memory(),
        }
        if (peak := metrics.peak_flops(run.device)) is not None:
            line["share_of_peak"] = flops / peak
        if (memory := metrics.device_memory(run.device)) is not None:
            line |= {"device_memory_in_use": memory["in_use"], "device_memory_peak": memory["peak"]}
        return line

    def evaluation_due(self) -> bool:
        """Whether there is to be an evaluation after the current step."""
        settings, step = self.run_.settings, self.training.step
        return step in (0, settings.steps) or bool(settings.eval_every and step % settings.eval_every == 0)

    def evaluated(self) -> bool:
        """Whether it was made, before the run was resumed; a signal may have ended it."""
        records = metrics.read_records(self.run_.settings.directory / metrics.EVALUATIONS)
        return any(record["step"] == self.training.step for record in records)

    def evaluate(self) -> float | None:
        """The mean held-out loss, written with that by position; None where no text is held out."""
        run, training, settings = self.run_, self.training, self.run_.settings
        heldout = run.data.heldout
        if heldout is None:
            return None
        # Held-out text that repeats within a sequence would look easier than it is, so a short one is not repeated.
        ctx = min(settings.ctx, longest(heldout, pack=settings.pack))
        total, count = np.zeros(ctx), np.zeros(ctx)
        self.progress.evaluation(training.step)
        for index in range(settings.eval_batches):
            batch = evaluation_batch(heldout, index=index, batch=settings.batch, ctx=ctx, pack=settings.pack)
            report = functools.partial(self.report, earlier=index * settings.batch)
            losses, training.pools = self.evaluation.losses(training.model, self.take_pools(), batch, report)
            total += losses.sum(axis=0)
            count += (batch.labels != IGNORE).sum(axis=0)
        loss = float(total.sum() / max(count.sum(), 1))
        ends = position_ends(ctx)
        parts = [(total[a:b].sum(), count[a:b].sum()) for a, b in zip([0, *ends], ends, strict=False)]
        by_position = [float(t / c) if c else math.nan for t, c in parts]
        self.writer.write_evaluation(training.step, loss=loss, position_ends=ends, loss_by_position=by_position)
        tokens = ctx * settings.batch * settings.eval_batches
        self.say(f"held-out loss {loss:.4f} after step {training.step} ({tokens:,} tokens)")
        return loss

    def take_pools(self) -> Pools:
        """The pools, to be donated; an interrupted step leaves none behind."""
        pools, self.training.pools = self.training.pools, None
        return _pools(self.run_) if pools is None else pools

    def save(self, loss: float | None) -> None:
        """A checkpoint of the current step. One that fails is told, and the run goes on."""
        training = self.training
        if not self.run_.settings.save_every or training.saved == training.step or training.step == 0:
            return
        try:
            self.checkpoints.save(training.step, training.state, metadata(self.run_), loss=loss)
            training.saved = training.step
        except CheckpointError as error:
            self.say(f"warning: not saved: {error}")

    def wait_for_save(self) -> None:
        """Returns when the state is no longer read by the save before, which the update would take from it."""
        try:
            self.checkpoints.wait_copied()
        except CheckpointError as error:
            self.training.saved = self.checkpoints.latest()
            self.say(f"warning: not saved: {error}")

    def settle(self) -> int:
        """Waits for the last save."""
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self.say(f"error: not saved: {error}")
            return FAILED
        saved = not self.run_.settings.save_every or self.training.saved == self.training.step
        return DONE if saved else FAILED

    def standing(self) -> str:
        """What is saved, and how to go on."""
        self.settle()
        latest = self.checkpoints.latest()
        if latest is None:
            return "no checkpoint was saved"
        return f"saved at step {latest}; go on with: {resume_command(self.run_.settings)}"

    def say(self, text: str) -> None:
        """A line above the progress line."""
        self.console.print(text, highlight=False, soft_wrap=True)


def facts(run: Run) -> metrics.RunFacts:
    """What the summary tells of the run."""
    return metrics.RunFacts(
        model=run.settings.model,
        parameters=models.parameter_count(run.model),
        context=run.settings.ctx,
        steps=run.settings.steps,
        device=run.device.device_kind,
        resume=resume_command(run.settings) if run.settings.save_every else "",
    )


def resume_command(settings: TrainConfig) -> str:
    """The command that continues the run."""
    python, here = Path(sys.executable), Path.cwd()
    python = python.relative_to(here) if python.is_relative_to(here) else Path("python")
    file = shlex.quote(str(settings.directory / "settings.json"))
    return f"{shlex.quote(str(python))} -m oomb_jax.train --config {file} --resume"


def step_flops(run: Run, attention_share: float) -> float:
    """Model FLOP of one sequence's training step, with that share of dense attention."""
    config = run.model_config
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return metrics.model_flops(
        parameters=models.parameter_count(run.model) - lookup,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        tokens=run.settings.ctx,
        attention_share=attention_share,
    )


def position_ends(ctx: int) -> list[int]:
    """Ends of ranges of positions that double in length, the last at ctx."""
    ends = [ctx]
    while ends[0] > 128 and len(ends) < 16:
        ends.insert(0, ends[0] // 2)
    return ends


def _pools(run: Run) -> Pools:
    return create_pools(run.model, run.settings.ctx, run.step.config)
