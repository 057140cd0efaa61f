"""The plan against the step compiled for an H200 without a GPU: bytes within 5 %, and no pool is copied.

Runs where the CUDA plugin is installed (the extra `aot`); a case compiles for about a minute.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.tolerance import PLANNED_BYTES

CASES = {
    "dense": "--ctx 16384 --attention dense",
    "dense, recomputed, bfloat16 sums": "--ctx 65536 --attention dense --remat full "
    "--grad-dtype bfloat16 --kv-grad-dtype bfloat16",
    "everything saved": "--ctx 65536 --attention dense --remat none",
    "pools on the host": "--ctx 262144 --offload all --grad-dtype bfloat16",
    "float8 pools on the host": "--model qwen2.5-0.5b --ctx 65536 --offload all --kv-dtype float8_e4m3fn",
    "tied embedding, Top-K, a million tokens": "--model qwen2.5-0.5b --ctx 1048576",
}


needs_plugin = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin")


@needs_plugin
@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_of_the_compiler(case):
    flags = "--plan --compile --json --device h200 --host-memory 128 --offload none --implementation mosaic"
    command = [sys.executable, "-m", "oomb_jax.train", *flags.split(), *CASES[case].split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout)
    for phase, planned in told["hbm_peaks"].items():
        # The optimizer, which is exact and large, would hide an error.
        without = told["hbm"]["optimizer"]
        compiled = told["compiled"]["hbm"][phase]
        assert abs((planned - without) / (compiled - without) - 1) < PLANNED_BYTES, (phase, planned, compiled)
    assert told["compiled"]["copies"] == []


@needs_plugin
def test_planned_bytes_are_those_of_a_gradient_compiled_as_one():
    """The table's gradient, 2 GiB in float32, comes in the place of what layers kept, not beside it."""
    command = [sys.executable, "-m", "tests.aot.h200_gradient", "16384"]
    environment = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(line.split(": ") for line in done.stdout.splitlines())
    assert abs(int(told["planned"]) / int(told["compiled"]) - 1) < PLANNED_BYTES, done.stdout
