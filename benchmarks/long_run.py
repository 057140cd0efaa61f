"""The training program, and besides, after every step: the seconds of its passes, and how many tensors it changed.

    python benchmarks/long_run.py --model qwen2.5-0.5b --ctx 4194304 --steps 2 --heldout 0 --save-every 0 --out runs/4m

Takes the flags of `python -m oomb_jax.train`. A tensor of the layers counts once for each layer. Of each one only a
weighted sum of its bits is kept, so that a model that fills the GPU can be watched.
"""

import sys
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from oomb_jax.train import loop
from oomb_jax.train.__main__ import main

ODD = np.uint32(2654435761)
"""By which neighbouring numbers weigh differently."""


@jax.jit
def fingerprints(model: Any) -> Any:
    """A number for each tensor, in each layer for itself."""

    def one(path, x):
        bits = jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        weights = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1) * ODD | jnp.uint32(1)
        axes = tuple(range(1, x.ndim)) if "layers" in jax.tree_util.keystr(path) else None
        return jnp.sum(bits.astype(jnp.uint32) * weights, axis=axes, dtype=jnp.uint32)

    return jax.tree_util.tree_map_with_path(one, model)


class WatchedLoop(loop.Loop):
    """The program's loop, with what this script tells of a step."""

    seconds: ClassVar[dict[str, float]] = {}
    """By pass, of the step under way."""
    reported: float = 0.0
    """When a pass reported last."""

    def one_step(self) -> None:
        """A step, and the line about it."""
        before = jax.device_get(fingerprints(self.training.model))
        self.seconds.clear()
        self.reported = time.monotonic()
        super().one_step()
        self.passed("update")
        after = jax.device_get(fingerprints(self.training.model))
        pairs = zip(*map(jax.tree.leaves, (before, after)), strict=True)
        changed = np.concatenate([np.ravel(x != y) for x, y in pairs])
        passes = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        self.say(f"step {self.training.step}: {changed.sum()} of {changed.size} weight tensors changed; {passes}")

    def report(self, name, *args, **options) -> None:
        """Also counts the time since the report before for this pass."""
        self.passed(name)
        super().report(name, *args, **options)

    def passed(self, name: str) -> None:
        """Counts the time since the last report."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0) + now - self.reported
        self.reported = now


if __name__ == "__main__":
    loop.Loop = WatchedLoop
    sys.exit(main())
