"""The step with all pools in host memory, compiled for an H200: nothing there is copied, and HBM hardly grows."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")
def test_pools_on_the_host_are_updated_in_place_and_hbm_hardly_grows():
    contexts = 2**18, 2**20, 2**22
    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_enable_triton_gemm=false",
    }
    command = [sys.executable, "-m", "tests.aot.h200_offload", *map(str, contexts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = lambda name: [int(x) for x in re.findall(rf"^{name}: (\d+)$", done.stdout, re.MULTILINE)]
    assert figures("context") == list(contexts)
    assert figures("host temporaries") == [0, 0, 0]
    assert figures("host not in place") == [0, 0, 0]
    assert done.stdout.count("on the host: []") == 3, done.stdout
    device = figures("device")
    # Selection, page ids, tokens: everything that grows must.
    growth = (device[2] - device[0]) / (contexts[2] - contexts[0])
    assert 0 < growth <= 1e6 / 10_000
    assert device[0] < device[1] < device[2]
