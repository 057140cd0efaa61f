"""Gradients against those of the PyTorch implementation of the paper.

`golden/reference_dense` holds a random Qwen2 of three layers, 4,096 ids, and the loss and gradients that the published
implementation (arXiv 2602.02108) computed for them on an H200, in bfloat16, with chunks of 1,024 and pages of 64. Its
loss is the sum over the 4,095 tokens that have a next one, divided by 4,096.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file

import oomb_jax
from tests.gradients import errors_by_tensor
from tests.tolerance import REFERENCE_MEDIAN, REFERENCE_WORST

GOLDEN = Path(__file__).parent / "golden" / "reference_dense"


def test_gradients_are_those_of_the_reference(tmp_path):
    model = oomb_jax.models.load(GOLDEN, dtype=jnp.float32)
    expected = load_file(GOLDEN / "gradients.safetensors")
    tokens = expected.pop("input_ids")[0]
    T = len(tokens)
    labels = jnp.roll(tokens, -1).at[-1].set(-100)
    config = oomb_jax.Config(chunk=1024, page=64)
    loss, grads, _ = jax.jit(oomb_jax.value_and_grad, static_argnames="config")(
        model, oomb_jax.create_pools(model, T, config), tokens, labels, config
    )
    np.testing.assert_allclose(loss * (T - 1) / T, 6.2890625, rtol=2**-8)  # itself rounded to bfloat16
    errors = errors_by_tensor(grads, expected, (T - 1) / T, tmp_path)
    assert np.median(errors) <= REFERENCE_MEDIAN
    assert np.max(errors) <= REFERENCE_WORST
