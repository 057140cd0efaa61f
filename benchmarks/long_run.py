"""The training program, and besides, after every step: the seconds of its passes, and how many weights it changed.

    python benchmarks/long_run.py --model qwen2.5-0.5b --ctx 4194304 --steps 2 --heldout 0 --save-every 0 --out runs/4m

Takes the flags of `python -m oomb_jax.train`. A weight counts for itself in every layer. Of each one only a weighted
sum of its bits is kept, so that a model that fills the GPU can be watched.
"""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oomb_jax.train import loop
from oomb_jax.train.__main__ import main

ODD = np.uint32(2654435761)
"""By which neighbouring numbers weigh differently."""


@jax.jit
def fingerprints(model: Any) -> Any:
    """A number for each weight, in each layer for itself."""

    def one(path, x):
        bits = jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        weights = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1) * ODD | jnp.uint32(1)
        axes = tuple(range(1, x.ndim)) if "layers" in jax.tree_util.keystr(path) else None
        return jnp.sum(bits.astype(jnp.uint32) * weights, axis=axes, dtype=jnp.uint32)

    return jax.tree_util.tree_map_with_path(one, model)


class WatchedLoop(loop.Loop):
    """The program's loop, with what this script tells of a step."""

    def one_step(self) -> None:
        """A step, and the line about it."""
        before = jax.device_get(fingerprints(self.training.model))
        self.reported = {"begin": time.monotonic()}
        super().one_step()
        self.reported["update"] = time.monotonic()
        after = jax.device_get(fingerprints(self.training.model))
        changed = np.concatenate(
            [np.ravel(x != y) for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)]
        )
        names, times = list(self.reported), list(self.reported.values())
        passes = ", ".join(f"{name} {b - a:.1f} s" for name, a, b in zip(names[1:], times, times[1:], strict=False))
        self.say(f"step {self.training.step}: {changed.sum()} of {changed.size} weights changed; {passes}")

    def report(self, name, *args, **options) -> None:
        """Also keeps when the pass last reported."""
        self.reported[name] = time.monotonic()
        super().report(name, *args, **options)


if __name__ == "__main__":
    loop.Loop = WatchedLoop
    sys.exit(main())
