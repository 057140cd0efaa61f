"""Bytes and seconds of a training step before it runs: from shapes, in milliseconds, without a GPU."""

from oomb_jax.plan.machine import DEVICES, Device, Machine, disk_for, host_available, named, this
from oomb_jax.plan.memory import Bytes, Job, account
from oomb_jax.plan.seconds import Seconds, estimate

__all__ = [
    "DEVICES",
    "Bytes",
    "Device",
    "Job",
    "Machine",
    "Seconds",
    "account",
    "disk_for",
    "estimate",
    "host_available",
    "named",
    "this",
]
