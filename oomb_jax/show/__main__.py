"""`python -m oomb_jax.show selection ...`, `python -m oomb_jax.show runs A B`."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console

from oomb_jax.show.config import Runs, Selection
from oomb_jax.train.__main__ import USAGE, prepare_process
from oomb_jax.train.config import TrainConfig

Command = (
    Annotated[Selection, tyro.conf.subcommand("selection")] | Annotated[Runs, tyro.conf.subcommand("runs")]
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and shows; returns the exit status."""
    settings = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]  # a union of types, which tyro makes subcommands of
        args=sys.argv[1:] if arguments is None else arguments,
        prog="python -m oomb_jax.show",
        description="Pictures and tables of what a model or a run does.",
    )
    # Tables keep their width where nothing measures it.
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
    try:
        if isinstance(settings, Runs):
            from oomb_jax.show import runs

            return runs.show(settings, console)
        prepare_process(TrainConfig())  # JAX reads its flags when it starts
        from oomb_jax.show import selection

        return selection.show(settings, console)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
