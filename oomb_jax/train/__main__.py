"""`python -m oomb_jax.train --ctx N`: train a model on sequences of N tokens."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from oomb_jax.train.config import TrainConfig, load

USAGE = 2
"""Exit status of a run that never began: a setting, a file or the machine does not fit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs; returns the exit status."""
    console = Console()
    try:
        settings = parse(sys.argv[1:] if arguments is None else arguments)
        prepare_process(settings)
        # JAX reads its flags when it starts.
        from oomb_jax.train.checkpoint import CheckpointError
        from oomb_jax.train.loop import train

        try:
            return train(settings, console)
        except CheckpointError as error:
            raise ValueError(str(error)) from error
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def parse(arguments: Sequence[str]) -> TrainConfig:
    """Settings from a command line; those of `--config` are the defaults of its other flags."""
    settings = tyro.cli(TrainConfig, args=arguments, prog="python -m oomb_jax.train")
    if settings.config is not None:
        settings = tyro.cli(TrainConfig, args=arguments, default=load(settings.config), prog="python -m oomb_jax.train")
    return dataclasses.replace(settings, config=None).check()


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
