"""The kernels compiled for an H200 without a GPU: nothing spills, nothing is copied, shared memory suffices.

Runs where the CUDA plugin and its compiler are installed (the extra `cuda13`). Each case compiles in a process of its
own: the compiler reports on its standard error.
"""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

CASES = {
    "dense": "",
    "top-k": "R=32, K=64, P=8192",
    "top-k, lists of heads": "R=32, K=64, P=8192, by_head=True",
    "segments": "segmented=True",
    "segments, top-k": "segmented=True, R=32, K=64, P=8192",
    "head width 64": "H=64, G=4",
    "pages of 64": "S=64, K=512",
    "pages of 64, top-k": "S=64, R=64, K=128",
    "segments, pages of 64": "segmented=True, S=64, K=512",
    "bfloat16 gradient pools": "gradient_dtype='bfloat16'",
    "new gradient pools": "gradient_dtype=None, R=32, K=64, P=2048, L=1",
    "stochastic rounding": "gradient_dtype='bfloat16', stochastic=True",
    "segments, one list for each head": "segmented=True, by_head=True",
    "stochastic rounding, segments, top-k, lists of heads": (
        "gradient_dtype='bfloat16', stochastic=True, segmented=True, R=32, K=64, by_head=True"
    ),
}


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_without_spills_and_copies(case):
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.aot.h200_paged_attention", f"dict({CASES[case]})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    kernels = [line for line in report.splitlines() if "bytes spill stores" in line and "bytes stack frame" in line]
    assert len(kernels) == 3, report  # forward, dq, dk and dv
    for line in kernels:
        assert not any(map(int, re.findall(r"(\d+) bytes spill", line))), f"{case}: {line}"
    assert "C751" not in report  # matrix products that wait for each other
    assert "copies: []" in report, report
