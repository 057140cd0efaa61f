"""Rotary angles at far positions, and the frequencies of each scaling."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.models import Rope
from oomb_jax.models.rope import cos_sin, frequencies, rotate
from tests.tolerance import ROPE

FAR = [0, 1, 4095, 65_537, 4_194_303, 16_777_217, 1_234_567_891, 2**31 - 1]
ROPES = {
    "default": Rope(theta=1e6),
    "linear": Rope(kind="linear", factor=3.0),
    "yarn": Rope(kind="yarn", theta=1e6, factor=4.0, original_max_position_embeddings=32_768),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [10, 128])
def test_angles_are_exact_at_every_int32_position(name, head_dim):
    rope = ROPES[name]
    cos, sin = jax.jit(lambda p: cos_sin(rope, head_dim, p, jnp.bfloat16))(jnp.asarray(FAR, jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    # Exact rational arithmetic on the float64 frequencies, so that the product itself has no rounding.
    turn = Fraction(2 * math.pi)
    angle = np.array([[float(p * Fraction(f) % turn) for f in frequencies(rope, head_dim).tolist()] for p in FAR])
    np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=ROPE)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=ROPE)


def test_float64_angles_are_float64():
    rope, positions = ROPES["default"], np.array(FAR[:5])
    with jax.enable_x64(True):
        cos, sin = cos_sin(rope, 64, jnp.asarray(positions, jnp.int32), jnp.float64)
        assert cos.dtype == jnp.float64
        angle = positions[:, None] * frequencies(rope, 64)[None]
        np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=1e-12)
        np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=1e-12)


def test_rotation_turns_the_two_halves_of_a_head_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 8)).astype(np.float32)
    angle = rng.normal(size=(5, 4)).astype(np.float32)
    turned = rotate(jnp.asarray(x), jnp.cos(angle), jnp.sin(angle))
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), rtol=0, atol=1e-6)


def test_scores_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 64))

    def score(at_q, at_k):
        turn = lambda x, p: rotate(x, *cos_sin(ROPES["default"], 64, jnp.asarray([p], jnp.int32), x.dtype))
        return float(jnp.vdot(turn(q, at_q), turn(k, at_k)))

    assert score(4_194_303, 4_194_000) == pytest.approx(score(303, 0), abs=1e-4)
    assert score(4_194_303, 4_194_000) != pytest.approx(score(304, 0), abs=1e-2)


@pytest.mark.parametrize("ctx", [100, 4096, 1_000_000])
def test_dynamic_scaling_follows_the_length(ctx):
    rope = Rope(kind="dynamic", factor=4.0, ctx=ctx, max_position_embeddings=4096)
    longest = 2 * math.pi / frequencies(rope, 64)[-1]
    trained = 2 * math.pi / frequencies(Rope(), 64)[-1]
    # The slowest pair is stretched as the formula says; up to the trained length nothing changes.
    assert longest / trained == pytest.approx(max(1.0, 4 * ctx / 4096 - 3), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "depends on the sequence length"),
        ({"kind": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"kind": "linear", "factor": 0.5}, "factor=0.5: at least 1"),
        ({"theta": 0.0}, "theta=0.0"),
        ({"factor": 2.0}, "'default' has no factor"),
        ({"kind": "linear", "factor": 2.0, "attention_factor": 1.1}, "'linear' has no attention_factor"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Rope(**settings)
