import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oomb_jax.rounding import stochastic_round


def _round(x, seed=0):
    return jax.jit(stochastic_round, static_argnums=1)(x, "bfloat16", jax.random.key(seed))


def _bits(x):
    return np.asarray(x).view(np.uint16)


def _random_floats(seed, n=4099):
    """Finite float32 of every sign and exponent, subnormals included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    x = bits.view(np.float32)
    return jnp.asarray(x[np.isfinite(x)])


def test_result_is_one_of_the_two_neighbours_and_finite():
    x = _random_floats(0)
    down = jnp.asarray((np.asarray(x).view(np.uint32) >> 16).astype(np.uint16))
    for seed in range(20):
        up = _bits(_round(x, seed)).astype(np.int32) - np.asarray(down).astype(np.int32)
        assert set(np.unique(up)) == {0, 1}
        assert bool(jnp.isfinite(_round(x, seed)).all())


def test_unbiased():
    n = 200_000
    for value in (1 + 2**-8 * 0.3, -3.1e-30, 1e-40, 12345.678, -(2**-7) * 1.999):
        x = np.float32(value)
        low = np.float32(np.asarray((x.view(np.uint32) >> 16).astype(np.uint32) << 16).view(np.float32))
        high = np.float32(np.asarray(((x.view(np.uint32) >> 16) + np.uint32(1)) << 16, np.uint32).view(np.float32))
        share = (float(x) - float(low)) / (float(high) - float(low))
        rounded = np.asarray(_round(jnp.full((n,), x, jnp.float32))).astype(np.float32)
        ups = np.mean(rounded == high)
        # Five standard deviations of a mean of n coin flips.
        assert abs(ups - share) < 5 * np.sqrt(share * (1 - share) / n) + 1e-9
        assert np.all((rounded == low) | (rounded == high))


def test_small_updates_add_up_where_rounding_to_nearest_stalls():
    def body(i, carry):
        nearest, random = carry
        step = jnp.float32(2**-12)
        key = jax.random.fold_in(jax.random.key(1), i)
        return (nearest.astype(jnp.float32) + step).astype(jnp.bfloat16), stochastic_round(
            random.astype(jnp.float32) + step, jnp.bfloat16, key
        )

    ones = jnp.ones((1000,), jnp.bfloat16)
    nearest, random = jax.jit(lambda: jax.lax.fori_loop(0, 1024, body, (ones, ones)))()
    assert float(nearest.astype(jnp.float32).mean()) == 1.0
    assert abs(float(random.astype(jnp.float32).mean()) - 1.25) < 0.01


def test_values_of_the_target_stay():
    bits = np.arange(2**16, dtype=np.uint32)
    x = jnp.asarray((bits << 16).view(np.float32))
    rounded = _round(x, 3)
    nan = np.isnan(np.asarray(x))
    np.testing.assert_array_equal(_bits(rounded)[~nan], bits[~nan].astype(np.uint16))
    assert bool(jnp.isnan(rounded[nan]).all())


def test_edges():
    largest = np.float32(jnp.finfo(jnp.bfloat16).max)
    x = np.array([np.finfo(np.float32).max, np.finfo(np.float32).min, np.inf, -np.inf, np.nan, -0.0], np.float32)
    payload = np.array([0x7F800001, 0xFFFFFFFF, 0xFF80FFFF], np.uint32).view(np.float32)
    for seed in range(10):
        rounded = np.asarray(_round(jnp.asarray(x), seed)).astype(np.float32)
        np.testing.assert_array_equal(rounded, [largest, -largest, np.inf, -np.inf, np.nan, -0.0])
        assert np.signbit(rounded[-1])
        assert np.isnan(np.asarray(_round(jnp.asarray(payload), seed)).astype(np.float32)).all()


def test_depends_on_the_key_alone():
    x = jax.random.normal(jax.random.key(7), (3, 5, 77))
    np.testing.assert_array_equal(_bits(_round(x, 5)), _bits(stochastic_round(x, jnp.bfloat16, jax.random.key(5))))
    assert (_bits(_round(x, 5)) != _bits(_round(x, 6))).any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn", "int8"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"bfloat16 only"):
        stochastic_round(jnp.ones((2,), jnp.float32), dtype, jax.random.key(0))
