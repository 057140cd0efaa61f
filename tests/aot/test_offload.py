"""The step with pools in host memory, compiled for an H200: nothing there is copied, and HBM hardly grows."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.tolerance import PLANNED_BYTES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")


def device_bytes(settings: str, *contexts: int) -> tuple[list[int], list[int]]:
    """Bytes in HBM by context, as compiled and as planned, when it is known that no pool on the host is copied."""
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.aot.h200_offload", settings, *map(str, contexts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = lambda name: [int(x) for x in re.findall(rf"^{name}: (\d+)$", done.stdout, re.MULTILINE)]
    for scope in "fill", "recompute", "backward":
        # Attention, its output and the three products of the feed-forward block, or more.
        beside = re.findall(rf"^products beside a fetch, {scope}: (.*)$", done.stdout, re.MULTILINE)
        assert len(beside) == len(contexts)
        assert all(int(count) >= 5 for counts in beside for count in counts.split()), done.stdout
        # Those of a layer at least, but for what its gradients need no more.
        assert all(count >= 7 for count in figures(f"products by the kernel, {scope}"))
    additions = re.findall(r"^products beside an addition: (.*)$", done.stdout, re.MULTILINE)
    assert len(additions) == len(contexts)
    # More than what is left of their own layer.
    assert all(int(count) >= 12 for counts in additions for count in counts.split()), done.stdout
    assert figures("context") == list(contexts)
    assert figures("host temporaries") == [0] * len(contexts)
    assert figures("host not in place") == [0] * len(contexts)
    assert figures("fetched pages copied") == [0] * len(contexts)
    assert done.stdout.count("on the host: []") == len(contexts), done.stdout
    if "float8" in settings:
        assert done.stdout.count("copied: []") == len(contexts), done.stdout
    return figures("device"), figures("planned")


def test_pools_on_the_host_are_updated_in_place_and_hbm_hardly_grows():
    contexts = 2**18, 2**20, 2**22
    device, _ = device_bytes("dict(hbm_layers=0)", *contexts)
    # Selection, page ids, tokens: everything that grows must.
    growth = (device[2] - device[0]) / (contexts[2] - contexts[0])
    assert 0 < growth <= 1e6 / 10_000
    assert device[0] < device[1] < device[2]


def test_float8_pools_are_updated_in_place_in_both_memories():
    device, planned = device_bytes("dict(hbm_layers=14, kv_dtype='float8_e4m3fn', kv_grad_pages=7000)", 2**20)
    assert abs(planned[0] / device[0] - 1) < PLANNED_BYTES
