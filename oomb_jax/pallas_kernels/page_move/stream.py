"""Streams of their own for the movers, so that pages travel while the device computes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.compute_on import compute_on

from oomb_jax.pallas_kernels.triton_call import device_capability


def on_copy_stream(move: Callable[..., Any], *, stream: int = 1) -> Callable[..., Any]:
    """The function `move`, run beside other work on an NVIDIA GPU, on a stream of its own; elsewhere `move` itself.
    stream: its number from 1; calls of the same one run one after the other.

        def body(carry, l):
            h, pool = carry
            pages = on_copy_stream(fetch_pages)(pool, l, wanted)
            h = matmuls(h)
            h, pages = lax.optimization_barrier((h, pages))  # matmuls, and only then the pages
            ...
            pool = on_copy_stream(store_pages)(pool, l, own, made)

        lax.scan(body, carry, iota(L))

    - The barrier holds the fetch open over the products; without it XLA waits for the pages at once. What a later call
      stores must come from behind the barrier too: an update that does not wait for the fetch makes XLA keep a copy of
      the whole pool for it.
    - XLA begins a call early only in a loop in which it slices something asynchronously itself: by the loop's counter,
      as an input of the scan is, or stacked weights. Else it begins where it ends.
    - `XLA_FLAGS=--xla_gpu_enable_command_buffer=`: commands in a buffer run one after the other.
    - A call updates at most one pool in host memory, and then has no other result: all results of a call are put where
      one of them is.

    Positional arguments are arrays; others go by keyword.
    """

    def moved(*args, **options):
        if not device_capability():
            return move(*args, **options)
        bound = functools.partial(move, **options)
        results: list[Any] = jax.make_jaxpr(bound)(*args).out_avals
        (space,) = {result.memory_space for result in results}
        return compute_on(bound, compute_type=f"gpu_stream:{stream}", out_memory_spaces=space)(*args)

    return moved
