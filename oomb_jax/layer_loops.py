"""Loops over some layers, upwards and back down, that keep for the way down what the way up made.

A layer whose pages are fetched uses one buffer while the next one's pages come into another. In a loop over single
layers the two would change places by a copy; in a loop over pairs of layers they take turns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Int

from oomb_jax.shapes import iota

Index = Int[Array, ""]


class Kept(NamedTuple):
    """What the layers of a loop keep."""

    lower: Any
    """Of the lower layer of each pair, stacked; where there are no pairs, of each layer."""
    upper: Any
    """Of the upper one; None where there are no pairs."""
    last: Any
    """Of the layer that is left over, where pairs are made of an odd number."""


def go_up[Carry](
    step: Callable[[Index, Carry, Any], tuple[Carry, Any]],
    first: Index,
    carry: Carry,
    inputs: Any,
    n: int,
    *,
    pairs: bool,
) -> tuple[Carry, Kept]:
    """`lax.scan` over n layers: `step(l, carry, input)` gives the carry and what is kept of layer l.

    Args:
      step: of a layer.
      first: int32, its number.
      carry: what it begins with.
      inputs: of the layers, a pytree stacked in rising order, or None.
      n: layers.
      pairs: two in each round of the loop.
    """

    def one(carry, x):
        l, carry = carry
        carry, kept = step(l, carry, x)
        return (l + 1, carry), kept

    def two(carry, x):
        l, carry = carry
        carry, lower = step(l, carry, x[0])
        carry, upper = step(l + 1, _between(carry), x[1])
        return (l + 2, carry), (lower, upper)

    if not pairs:
        (_, carry), kept = lax.scan(one, (first, carry), inputs, length=n)
        return carry, Kept(kept, None, None)
    lower, upper, last = _split(inputs, n)
    (l, carry), kept = lax.scan(two, (first, carry), (lower, upper), length=n // 2)
    carry, rest = step(l, carry, last) if n % 2 else (carry, None)
    return carry, Kept(*kept, rest)


def go_down[Carry, Halfway](
    first: Callable[[Index, Carry, Any], Halfway],
    second: Callable[[Index, Halfway, Any, Any], Carry],
    last: Index,
    carry: Carry,
    kept: Kept,
    inputs: Any,
    n: int,
    *,
    pairs: bool,
) -> Carry:
    """Back through the same layers from layer `last`. Of each, `first(l, carry, kept)` gives what is in its middle, and
    `second(l, halfway, kept, input)` the carry. `kept` is of `go_up`.

    With pairs a round begins and ends in the middle of a layer. What is under way must come to its end there; so what a
    second half begins has that half and the first one of the layer below to hide it, unless it is waited for before.
    """

    def single(carry, x):
        l, carry = carry
        kept, inputs = x
        return (l - 1, second(l, first(l, carry, kept), kept, inputs)), None

    if not pairs:
        return lax.scan(single, (last, carry), (kept.lower, inputs), length=n, reverse=True)[0][1]

    *both, rest = _split(inputs, n)
    m = n // 2
    of_pair = lambda i: tuple(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), k) for k in kept[:2])

    def from_upper(l, halfway, upper, lower, inputs):
        """From the middle of the upper layer of a pair to the end of the lower one."""
        of_lower, of_upper = inputs
        halfway = _between(first(l - 1, second(l, halfway, upper, of_upper), lower))
        return second(l - 1, halfway, lower, of_lower)

    def pair(state, x):
        i, inputs = x
        l, halfway = state
        lower, upper = of_pair(i)
        carry = from_upper(l, halfway, upper, lower, inputs)
        return (l - 2, first(l - 2, carry, of_pair(i - 1)[1])), None

    if n % 2:
        last, carry = last - 1, second(last, first(last, carry, kept.last), kept.last, rest)
    if not m:
        return carry
    of_pairs = lambda index: jax.tree.map(lambda x: x[index], both)
    state = last, first(last, carry, of_pair(m - 1)[1])
    rounds = 1 + iota(m - 1), of_pairs(slice(1, None))
    l, halfway = lax.scan(pair, state, rounds, length=m - 1, reverse=True)[0]
    lower, upper = of_pair(0)
    return from_upper(l, halfway, upper, lower, of_pairs(0))


def _between[Carry](carry: Carry) -> Carry:
    """As if the round ended between the two layers: else XLA would put off to its end what the second does not wait
    for, and pages would be under way with nothing to hide them."""
    return lax.optimization_barrier(carry)


def _split(inputs: Any, n: int) -> tuple[Any, Any, Any]:
    """Of the lower layers of the pairs, of the upper ones, and of a layer that is left over (else None)."""
    at = lambda index: jax.tree.map(lambda x: x[index], inputs)
    paired = n // 2 * 2
    return at(slice(0, paired, 2)), at(slice(1, paired, 2)), at(-1) if n % 2 else None
