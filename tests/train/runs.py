"""Whole runs: their flags, and what they leave."""

from pathlib import Path
from typing import Any

from oomb_jax.train.checkpoint import Checkpoints
from oomb_jax.train.metrics import RunFacts

FACTS = RunFacts(
    model="tiny",
    parameters=1_234_567,
    context=16384,
    steps=90,
    device="cpu",
    resume="oomb_jax --resume",
)


def flags(text: Path, out: Path, **more) -> list[str]:
    """A run of a second: 3 chunks of 2 pages, the last one partial."""
    given = {
        "model": "tiny", "ctx": 300, "chunk": 128, "page": 64, "steps": 4, "learning_rate": 0.01,
        "data": text, "out": out, "platform": "cpu",
    } | more  # fmt: skip
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def final_state(out: Path) -> dict[str, Any]:
    """The step of the latest checkpoint, and dtype, shape and checksum of every leaf in it."""
    with Checkpoints(out / "checkpoints") as checkpoints:
        latest = checkpoints.latest()
        assert latest is not None
        return {"step": latest, **checkpoints._about(latest)["leaves"]}
