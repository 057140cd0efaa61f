"""`python -m oomb_jax.train --ctx N`: train a model on sequences of N tokens."""

import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from oomb_jax.train.config import TrainConfig, load

USAGE = 2
"""Exit status of a run that never began: a setting, a file or the machine does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Flags of the plan; they are not part of a run's settings."""

    plan: bool = False
    """Only tell what the run takes, how long a step lasts and what fits; touches no GPU."""

    device: str = "this"
    """The machine to plan for: `this`, h200, h100, a100-80g or rtx-4090."""

    host_memory: float | None = None
    """GiB of host memory to plan with. None: those of this machine."""

    distinct_pages: float | None = None
    """With `topk`, distinct pages that a chunk is thought to choose in a layer. None: as if chosen at random."""

    compile: bool = False
    """Compile the step too and print the compiler's figures beside the plan's; for a device that is not here with the
    extra `aot`. Exit status 1 where a pool is copied."""

    json: bool = False
    """Print the plan as JSON."""

    def check(self) -> "PlanFlags":
        """The same flags.

        Raises:
          ValueError: a flag that needs `--plan` stands without it.
        """
        if not self.plan and self != PlanFlags():
            raise ValueError("--device, --host-memory, --distinct-pages, --compile and --json go with --plan")
        if self.host_memory is not None and self.host_memory < 0:
            raise ValueError(f"host_memory={self.host_memory:g}: at least 0 GiB")
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Train a language model on sequences of `ctx` tokens, chunk by chunk."""

    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=TrainConfig)
    plan: Annotated[PlanFlags, tyro.conf.arg(name="")] = dataclasses.field(default_factory=PlanFlags)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs; returns the exit status."""
    console = Console(markup=False)  # paths and messages of errors may hold brackets
    try:
        command = parse_command(sys.argv[1:] if arguments is None else arguments)
        if command.plan.plan:
            from oomb_jax.train.plan_report import show
            from oomb_jax.train.setup import find_model

            return show(command.settings, find_model(command.settings), command.plan)
        prepare_process(command.settings)
        # JAX reads its flags when it starts.
        from oomb_jax.train.checkpoint import CheckpointError
        from oomb_jax.train.loop import train

        try:
            return train(command.settings, console)
        except CheckpointError as error:
            raise ValueError(str(error)) from error
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Settings of a run from a command line."""
    return parse_command(arguments).settings


def parse_command(arguments: Sequence[str]) -> Command:
    """Settings and flags from a command line; the settings of `--config` are the defaults of its other flags."""
    read = functools.partial(tyro.cli, Command, args=arguments, prog="python -m oomb_jax.train")
    command = read()
    if command.settings.config is not None:
        command = read(default=Command(settings=load(command.settings.config)))
    settings = dataclasses.replace(command.settings, config=None).check()
    return Command(settings=settings, plan=command.plan.check())


def prepare_process(settings: TrainConfig) -> None:
    """Settings of JAX that must be made before it starts."""
    # With command buffers nothing overlaps on a GPU, and a chunk's loops are launched all the same.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_enable_command_buffer" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    # The pools are a run's to size: by default JAX would take three quarters of the GPU and no more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oomb_jax" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(cache))


if __name__ == "__main__":
    sys.exit(main())
