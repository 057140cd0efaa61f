"""XLA does not take the two gradient pools of the backward kernels, both zeros, for one."""

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_calls_that_update_two_pools_are_in_no_fusion(implementation):
    environment = os.environ | {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false",
    }
    command = [sys.executable, "-m", "tests.aot.h200_zero_pools", implementation]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "in place: 1\n" in done.stdout
    assert "fused: []" in done.stdout
