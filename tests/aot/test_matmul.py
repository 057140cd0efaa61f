"""The product kernel compiled for an H200 without a GPU: nothing spills, no product waits for another, shared memory
suffices. See tests/aot/test_paged_attention.py."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

CASES = ("C=4096, I=3584, O=18944", "C=4096, I=3584, O=512", "C=4096, I=4096, O=64", "C=72, I=192, O=1024")


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_without_spills(case):
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.aot.h200_matmul", f"dict({case})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    kernels = [line for line in report.splitlines() if "bytes spill stores" in line and "bytes stack frame" in line]
    assert len(kernels) == 3, report  # the product, the gradients of its two factors
    for line in kernels:
        assert not any(map(int, re.findall(r"(\d+) bytes", line))), f"{case}: {line}"
    assert not re.search(r"C751[0-8]", report), report  # products that wait for each other
    assert "temporaries: 0" in report
