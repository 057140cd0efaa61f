"""The device that is compiled for: what the kernels may use, and what was chosen for it."""

import functools
import logging
import re

import jax

ROWS = 64
"""Rows of a matrix instruction on Hopper, so the queries (or keys) that one warpgroup owns."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may use on Hopper."""


def is_hopper() -> bool:
    """Whether the device is a Hopper GPU."""
    described = jax.sharding.get_abstract_mesh().abstract_device  # compiling for a device that is not here
    if described is not None:
        return re.search(r"\bG?H(100|200|20|800)\b", described.device_kind) is not None
    return getattr(_device(), "compute_capability", "").startswith("9.")


def is_gpu() -> bool:
    """Whether the device is a GPU."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (described or _device()).platform in ("gpu", "cuda", "rocm")


def no_hopper() -> str | None:
    """Why the Mosaic kernels cannot run on the device; None if they can."""
    return None if is_hopper() else "no Hopper GPU (H100, H200)"


@functools.cache
def say_choice(operation: str, chosen: str, reason: str | None) -> None:
    """Logs once which implementation of an operation nobody named; reason: why not a faster one."""
    because = "" if reason is None else f", because: {reason}"
    logging.getLogger(__name__).info("%s: implementation %r%s", operation, chosen, because)


def _device():
    return jax.config.jax_default_device or jax.devices()[0]
