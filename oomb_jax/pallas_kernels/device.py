"""The device that is compiled for, and which implementation of an operation runs on it."""

import functools
import itertools
import logging
import re
from collections.abc import Mapping

import jax

ROWS = 64
"""Rows of a matrix instruction on Hopper, so the queries (or keys) that one warpgroup owns."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may use on Hopper."""


def choose(operation: str, implementation: str | None, refusals: Mapping[str, str | None]) -> str:
    """The implementation to use: the one that is named, or the first that does not refuse.

    Args:
      operation: its name in the log: on a GPU, what nobody named is told once.
      implementation: the name, or None.
      refusals: why each implementation cannot take the input on this device, None if it can; the fastest first.
        `"reference"` always can.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the named one refuses.
    """
    names = *refusals, "reference"
    if implementation not in (None, *names):
        raise ValueError(f"implementation={implementation!r}: None, or one of {names}")
    if implementation is not None:
        reason = refusals.get(implementation)
        if reason is not None:
            raise NotImplementedError(f"implementation={implementation!r}: {reason}; pass 'reference' or None")
        return implementation
    chosen = next((name for name, reason in refusals.items() if reason is None), "reference")
    if (_described() or current_device()).platform == "gpu":
        faster = itertools.takewhile(lambda item: item[0] != chosen, refusals.items())
        _log_once("; ".join([f"{operation}: {chosen}", *(f"not {name}: {reason}" for name, reason in faster)]))
    return chosen


def no_hopper() -> str | None:
    """Why the Mosaic kernels cannot run on the device; None if it is a Hopper GPU."""
    described = _described()
    if described is not None:
        hopper = re.search(r"\bG?H(100|200|20|800)\b", described.device_kind) is not None
    else:
        hopper = getattr(current_device(), "compute_capability", "").startswith("9.")
    return None if hopper else "no Hopper GPU (H100, H200)"


def multiprocessors() -> int:
    """Of the GPU that is compiled for; 0 where there is none."""
    described = _described()
    if described is not None:
        if described.num_cores is None:
            raise ValueError(f"{described}: a device that is described needs its number of multiprocessors, num_cores")
        return described.num_cores
    device = current_device()
    return device.core_count if device.platform == "gpu" else 0


def current_device():
    """The device that is computed on where nothing else is said."""
    default = jax.config.jax_default_device
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def _described():
    """A device that is not here but compiled for, or None."""
    return jax.sharding.get_abstract_mesh().abstract_device


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger(__name__).info(message)
