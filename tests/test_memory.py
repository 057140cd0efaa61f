"""Memory of a compiled step: constant in the length of the sequence."""

import functools

import jax
import jax.numpy as jnp
import pytest

import oomb_jax


@pytest.fixture(autouse=True)
def optimised():
    """Memory is that of the code that users run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def temporaries(name, dtype, config, chunks):
    """Bytes that a compiled step allocates besides its arguments and results. Nothing is allocated here."""
    T = chunks * config.chunk
    model = oomb_jax.models.abstract(name, dtype=dtype)
    pools = jax.eval_shape(functools.partial(oomb_jax.create_pools, ctx=T, config=config), model)
    ids = jax.ShapeDtypeStruct((T,), jnp.int32)
    step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
    analysis = step.lower(model, pools, ids, ids, config).compile().memory_analysis()
    assert analysis is not None
    # The donated pools come back in place: nothing of their size may be among the temporaries.
    pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
    assert analysis.alias_size_in_bytes >= pool_bytes
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize(
    ("name", "dtype", "config"),
    [
        ("tiny", jnp.float32, oomb_jax.Config(chunk=1024)),
        ("qwen2.5-7b", jnp.bfloat16, oomb_jax.Config(chunk=4096)),
    ],
)
def test_temporaries_do_not_grow_with_the_sequence(name, dtype, config):
    short, long = (temporaries(name, dtype, config, chunks) for chunks in (32, 256))
    assert long < 1.01 * short
