"""The letters and array types used in every signature.

    B  sequences in a batch          L  layers                     S  tokens in a page
    T  tokens in a sequence          N  query heads                P  pages in a pool
    C  tokens in a chunk             M  key/value heads            K  selected pages of a query page
    n  chunks in a sequence          G  query heads per key/value  U  unique pages in a staging buffer
    D  model width                   H  head width                 V  vocabulary
    F  feed-forward width

A pool is `[L, P, M, S, H]`: one head of one page is contiguous. A page of S queries is a *query page*.
"""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Tokens = Int[Array, "*B T"]
"""int32 token ids."""

Labels = Int[Array, "*B T"]
"""int32 next-token ids, aligned with the tokens (already shifted); -100 = no loss here."""

Segments = Int[Array, "*B T"]
"""int32 document ids, never decreasing along a sequence; a token attends only inside its own document."""

Hidden = Float[Array, "C D"]
Positions = Int[Array, " C"]
Queries = Float[Array, "C N H"]
Keys = Float[Array, "C M H"]
Values = Float[Array, "C M H"]
Pool = Float[Array, "L P M S H"]
Scalar = Float[Array, ""]

IGNORE = -100
"""The label of a token that has no loss."""


def accumulator(dtype: DTypeLike) -> np.dtype:
    """dtype of sums, softmax, norms and the loss for a model of `dtype`: float32, or float64 for float64."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def iota(n: int) -> Int[Array, " n"]:
    """0 .. n-1 in int32, the dtype of every index, also where float64 is enabled."""
    return jnp.arange(n, dtype=jnp.int32)


def divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`, and 1 where that is smaller."""
    return max(d for d in range(1, max(1, min(n, limit)) + 1) if n % d == 0)
