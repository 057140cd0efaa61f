"""The selection compiled for an H200 without a GPU: its scratch at four million tokens, and no spills in the kernel."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

CASES = {
    "reference": "implementation='reference'",
    "mosaic": "implementation='mosaic'",
    "mosaic by default, by key/value head": "implementation=None, scope='kv_head', segmented=True",
    "mosaic, pages of 64, head width 64": "implementation='mosaic', S=64, H=64, M=2, P=65536",
}


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")
@pytest.mark.parametrize("case", CASES)
def test_scratch_stays_below_256_mib(case):
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.aot.h200_selection", f"dict({CASES[case]})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    (temporaries,) = re.findall(r"temporaries: (\d+)", report)
    assert int(temporaries) < 2**28
    kernels = [line for line in report.splitlines() if "bytes spill stores" in line]
    assert len(kernels) == case.startswith("mosaic"), report
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in kernels), report
    assert "C751" not in report  # matrix products that wait for each other
