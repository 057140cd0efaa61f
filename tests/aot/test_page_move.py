"""The movers in nested scans, compiled for an H200 without a GPU: pools in host memory are neither copied nor touched
by anything else, and the movers run under matrix products."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from oomb_jax.pallas_kernels.triton_call import missing

CASES = {
    "bfloat16": "",
    "float8 keys, float32 gradients": "float8=True, gradient_dtype='float32'",
    "on the device": "host=False",
    "pages of 64": "S=64, H=64, M=8",
}


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")
@pytest.mark.skipif(missing() is not None, reason="needs jax-triton")
@pytest.mark.parametrize("case", CASES)
def test_pools_stay_in_place_and_movers_run_under_matrix_products(case):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, "-m", "tests.aot.h200_page_move", f"dict({CASES[case]})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert "temporaries on the host: 0\n" in report
    assert "not updated in place: 0\n" in report
    assert "on the host: []\n" in report, report
    (temporaries,) = re.findall(r"^temporaries: (\d+)", report, re.MULTILINE)
    assert int(temporaries) < 2**26  # one layer of a pool
    (hidden,) = re.findall(r"^hidden: \[(.*)\]", report, re.MULTILINE)
    hidden = [int(count) for count in hidden.split(",")]
    # Filled: fetch and store. In reverse: fetch, fetch of own gradients, add.
    assert len(hidden) == 5
    assert all(hidden), report
