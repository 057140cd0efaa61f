"""Loops over some layers, upwards and back down, that keep for the way down what the way up made.

A layer whose pages are fetched uses one buffer while the next one's pages come into another. In a loop over single
layers the two would change places by a copy; in a loop over pairs of layers they take turns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax


class Kept(NamedTuple):
    """What the layers of a loop keep."""

    lower: Any
    """Of the lower layer of each pair, stacked; where there are no pairs, of each layer."""
    upper: Any
    """Of the upper one; None where there are no pairs."""
    last: Any
    """Of the layer that is left over, where pairs are made of an odd number."""


def go_up[Carry](
    step: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, inputs: Any, n: int, *, pairs: bool
) -> tuple[Carry, Kept]:
    """`lax.scan` over n layers: `step(carry, input)` gives the carry and what is kept of a layer.

    Args:
      step: of a layer.
      carry: what the first begins with.
      inputs: of the layers, a pytree stacked in rising order, or None.
      n: layers.
      pairs: two in each round of the loop.
    """
    if not pairs:
        carry, kept = lax.scan(step, carry, inputs, length=n)
        return carry, Kept(kept, None, None)

    def two(carry, inputs):
        carry, lower = step(carry, inputs[0])
        carry, upper = step(carry, inputs[1])
        return carry, (lower, upper)

    lower, upper, last = _split(inputs, n)
    carry, kept = lax.scan(two, carry, (lower, upper), length=n // 2)
    carry, rest = step(carry, last) if n % 2 else (carry, None)
    return carry, Kept(*kept, rest)


def go_down[Carry](
    step: Callable[[Carry, Any, Any], Carry], carry: Carry, kept: Kept, inputs: Any, n: int, *, pairs: bool
) -> Carry:
    """Back through the same layers: `step(carry, kept, input)` gives the carry. `kept` is of `go_up`."""
    if not pairs:
        one = lambda carry, x: (step(carry, *x), None)
        return lax.scan(one, carry, (kept.lower, inputs), length=n, reverse=True)[0]

    def two(carry, x):
        (lower, upper), inputs = x
        carry = step(carry, upper, inputs[1])
        return step(carry, lower, inputs[0]), None

    *both, last = _split(inputs, n)
    if n % 2:
        carry = step(carry, kept.last, last)
    return lax.scan(two, carry, (kept[:2], both), length=n // 2, reverse=True)[0]


def _split(inputs: Any, n: int) -> tuple[Any, Any, Any]:
    """Of the lower layers of the pairs, of the upper ones, and of a layer that is left over (else None)."""
    at = lambda index: jax.tree.map(lambda x: x[index], inputs)
    paired = n // 2 * 2
    return at(slice(0, paired, 2)), at(slice(1, paired, 2)), at(-1) if n % 2 else None
