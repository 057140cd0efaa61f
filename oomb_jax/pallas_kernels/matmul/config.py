"""Tile sizes of the kernel, and which inputs it takes."""

import dataclasses

import jax
import jax.numpy as jnp

from oomb_jax.pallas_kernels.device import ROWS, SHARED_MEMORY

DEPTH = 64
"""Of a tile, along the axis that is summed over: what a row of shared memory holds of 16-bit values."""

OUTPUT = 2 * 2 * ROWS * 64 * 2
"""Bytes of shared memory for results on their way: two warpgroups, two pieces each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the kernel cuts the result: two warpgroups compute a tile, each half of its rows."""

    rows: int
    columns: tuple[int, ...]
    """Of each matrix instruction, next to each other; at most 256."""
    slowdown: float
    """Beside tiles of 256 x 128, for the same area (measured on an H200)."""

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return sum(self.columns)

    @property
    def stages(self) -> int:
        """Tiles of inputs in flight, all that shared memory holds of up to four. Two KiB are left to barriers."""
        return min(4, (SHARED_MEMORY - OUTPUT - 2048) // (2 * DEPTH * (self.rows + self.width)))


TILES = (
    Tiles(rows=256, columns=(128,), slowdown=1.0),
    # Where 256 x 128 leave many programs idle in the last round: 4096 x 3584 are 3 rounds of 128 programs, not 4.
    Tiles(rows=128, columns=(192, 128), slowdown=1.05),
    Tiles(rows=128, columns=(128,), slowdown=1.2),
    Tiles(rows=128, columns=(64,), slowdown=1.5),
)


def tiles(M: int, N: int, programs: int) -> Tiles:
    """The tiles with which so many programs compute [M, N] the soonest."""

    def time(tile: Tiles) -> float:
        count = -(-M // tile.rows) * -(-N // tile.width)
        return -(-count // programs) * tile.rows * tile.width * tile.slowdown

    return min(TILES, key=time)


def unsupported(x, weight) -> str | None:
    """Why the kernel cannot multiply these and their gradients; None if it can."""
    if jax.config.read("jax_enable_x64"):
        return "64-bit mode, where the kernel counts in 32 bits"
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{x.dtype} @ {weight.dtype}, where the kernel takes bfloat16 or float16"
    if x.ndim != 2 or weight.ndim != 2:
        return f"{x.shape} @ {weight.shape}, where the kernel takes matrices"
    if x.shape[0] % 8 or any(size % DEPTH for size in weight.shape):
        return f"{x.shape} @ {weight.shape}, where the copy engine takes multiples of 8 rows and {DEPTH} columns"
    return None
