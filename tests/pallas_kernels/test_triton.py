"""The Triton kernels of paged attention: on a GPU, in Triton's interpreter, and compiled for GPUs that are not here.

On a GPU: `JAX_PLATFORMS=cuda,cpu pytest tests/pallas_kernels`. The interpreter needs jax-triton, compiling also the
CUDA plugin.
"""

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.pallas_kernels.paged_attention import paged_attention, paged_attention_vjp, triton_config
from oomb_jax.pallas_kernels.paged_attention.cases import GPU, Case, inputs
from oomb_jax.pallas_kernels.triton_call import missing
from tests.pallas_kernels.assemble import needs_assembler
from tests.pallas_kernels.test_paged_attention import Suite, at_most_plain

AMPERE = jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 8

bf16 = functools.partial(Case, dtype="bfloat16")
CASES = (
    bf16(C=512, M=2, G=2, H=96, S=128, earlier=5),
    bf16(C=512, M=1, G=3, H=96, S=64, earlier=4, rows=4, segments=True),
    Case(C=384, M=2, G=1, H=256, S=128, earlier=6, dtype="float16"),
    bf16(C=384, M=1, G=4, H=256, S=64, earlier=3, rows=3, segments=True, gradient_dtype="bfloat16"),
    bf16(C=512, M=1, G=7, H=128, S=16, earlier=37, rows=4),
    bf16(C=512, M=2, G=2, H=64, S=32, earlier=9, segments=True, partial=True, sinks=True),
    # Rows and chunks that are no multiple of a tile or a page.
    bf16(C=700, M=1, G=5, H=128, S=128, earlier=3),
    bf16(C=315, M=2, G=2, H=64, S=64, earlier=5, rows=3, segments=True),
    bf16(C=33, M=1, G=16, H=128, S=16, earlier=2, rows=3),
    bf16(C=200, M=1, G=2, H=80, S=32, earlier=7, rows=5, gradient_dtype="bfloat16"),
)
"""What the other kernels do not take."""


@pytest.mark.skipif(not AMPERE, reason="needs an NVIDIA GPU of compute capability 8.0 or higher")
class TestTriton(Suite):
    forward = staticmethod(jax.jit(functools.partial(paged_attention, implementation="triton")))
    backward = staticmethod(jax.jit(functools.partial(paged_attention_vjp, implementation="triton")))

    @pytest.mark.parametrize("case", CASES + tuple(case for case in GPU if not case.by_head)[::3], ids=str)
    def test_results_are_as_good_as_plain_attention(self, case):
        self.check(case, at_most_plain(case))
        self.check_repeats(case)

    def test_new_gradient_pools(self):
        self.check_new_pools(CASES[0])

    def test_rows_of_the_same_pages_give_the_bits_of_one_row(self):
        case = Case(C=512, M=2, G=3, H=128, S=128, earlier=5, dtype="bfloat16")
        x = inputs(case, seed=2)
        by_row = dataclasses.replace(x, forward=(*x.forward[:6], jnp.repeat(x.forward[6], 4, axis=0)))
        for one, many in zip(self.run(x), self.run(by_row), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(many).tobytes()


def offline(*arguments, **environment):
    """What `tests.pallas_kernels.triton_offline` prints."""
    command = [sys.executable, "-m", "tests.pallas_kernels.triton_offline", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_triton = pytest.mark.skipif(missing() is not None, reason="needs jax-triton")


@needs_triton
def test_interpreted_results_are_as_good_as_plain_attention():
    offline("interpret", TRITON_INTERPRET="1")


SHARED_MEMORY = {"80": 163, "86": 99, "90": 227}  # KiB that one program may use
COMPILED = (
    ("80", ""),
    ("80", "H=64, G=4"),
    ("80", "H=256"),
    ("86", "H=96"),
    ("86", "H=256, gradient_dtype='bfloat16'"),
    ("86", "S=16"),
    ("86", "R=32, K=64, segmented=True"),
    ("90", ""),
    ("90", "H=256"),
    ("90", "R=32, K=64, segmented=True"),
)


@needs_triton
@needs_assembler
@pytest.mark.parametrize(("capability", "shape"), COMPILED)
def test_kernels_compile_without_spills(capability, shape, tmp_path):
    lines = offline("compile", capability, shape, JAX_TRITON_DUMP_DIR=str(tmp_path)).splitlines()
    # Only the gradient pools are updated in place.
    assert [line for line in lines if line.startswith("aliases")] == ["aliases: 0", "aliases: 2"]
    kernels = [line.split()[1:] for line in lines if line.startswith("kernel")]
    assert len(kernels) == 3
    for name, spilled, shared in kernels:
        # A few bytes are a value set aside while a loop runs. On Hopper the fastest tiles of dk/dv spill a little.
        most = 256 if (name, capability) == ("_key_gradients", "90") else 16
        assert int(spilled) <= most, name
        assert int(shared) <= SHARED_MEMORY[capability] * 1024, name


def test_inputs_that_the_kernels_do_not_take_are_refused(monkeypatch):
    x = inputs(Case(C=64, M=1, G=2, H=64, S=32, earlier=2, dtype="bfloat16"), seed=0)
    forward = functools.partial(paged_attention, implementation="triton")
    if not AMPERE:
        with pytest.raises(NotImplementedError, match="'triton': no NVIDIA GPU of compute capability"):
            forward(*x.forward)
    monkeypatch.setattr(triton_config, "device_capability", lambda: 80)
    monkeypatch.setattr(triton_config, "missing", lambda: "pip install")
    with pytest.raises(NotImplementedError, match="'triton': pip install"):
        forward(*x.forward)
    with pytest.raises(NotImplementedError, match="'triton': queries of float32"):
        forward(x.forward[0].astype("float32"), *x.forward[1:])
    with pytest.raises(NotImplementedError, match="'triton': head width 8"):
        forward(*inputs(Case(C=16, M=1, G=1, H=8, S=16, earlier=0, dtype="bfloat16"), seed=0).forward)
    by_head = dataclasses.replace(x, forward=(*x.forward[:6], x.forward[6][:, None]))
    with pytest.raises(NotImplementedError, match="'triton': a list of pages for each key/value head"):
        forward(*by_head.forward)
    arguments = *x.forward[:5], x.dk_pool, x.dv_pool, *x.forward[5:], x.d_out, jnp.zeros((2, 64)), x.d_out
    with pytest.raises(NotImplementedError, match="'triton': a rounding_key"):
        paged_attention_vjp(*arguments, rounding_key=jax.random.key(0), implementation="triton")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'jax-triton" in (missing() or "")
