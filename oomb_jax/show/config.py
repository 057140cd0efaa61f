"""Settings of what is shown."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from oomb_jax.selection import Scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which pages attend to which: one sequence goes through a model's fill pass, and what it chose is drawn."""

    run: Path | None = None
    """Directory of a training run: its latest checkpoint is shown, and its settings are the defaults of the flags
    below."""

    model: str | None = None
    """A named model, or a Hugging Face directory. None: tiny."""

    weights: str | None = None
    """A Hugging Face directory to load, or `random`. None: the directory that `model` names, else random."""

    data: str | None = None
    """Text for the sequence, as in the training program; of held-out text if there is enough. None: stdlib."""

    tokenizer: str | None = None
    """`bytes`, or a `tokenizer.json` or a directory that holds one. None: as in the training program."""

    ctx: int | None = None
    """Tokens of the sequence. None: 16,384."""

    chunk: int | None = None
    """Tokens of a chunk. None: 4096 on a GPU, 1024 on a CPU."""

    page: int | None = None
    """Tokens of a page. None: 128."""

    pages: int | None = None
    """Pages that a query page chooses. None: 64, or a quarter of those in the sequence where that is less."""

    scope: Scope = "all_heads"
    """`all_heads`: one choice for all heads. `kv_head`: one for each key/value head."""

    implementation: Literal["reference", "mosaic"] | None = None
    """Which attention runs, as in the training program."""

    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to run."""

    out: Path | None = None
    """Directory of the pictures. None: the run's, else runs/selection-MODEL-CTX."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Two training runs, loss against loss: the first is what the second is measured by."""

    directories: tyro.conf.Positional[tuple[Path, Path]]
    """Directories of the runs."""
