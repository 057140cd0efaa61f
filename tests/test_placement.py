"""Pools on the host and in HBM: the same bits, through the kernels and the movers of a GPU. (tests/test_chunked.py has
the same placements on a CPU, where there is one memory, and plain JAX sums staged pages in another order.)

    JAX_PLATFORMS=cuda,cpu XLA_FLAGS=--xla_gpu_enable_command_buffer= pytest tests/test_placement.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax.models import ModelConfig
from oomb_jax.parts import layer_count

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    group: int
    kv_heads: int
    head_dim: int
    page: int
    rows: int
    """Pages of a chunk."""
    chunks: float
    """Of the sequence; the last need not be whole."""
    kv_grad_dtype: str | None = None


SHAPES = (
    Shape(group=7, kv_heads=2, head_dim=128, page=128, rows=4, chunks=6.3),
    Shape(group=2, kv_heads=1, head_dim=64, page=64, rows=6, chunks=5, kv_grad_dtype="bfloat16"),
    Shape(group=1, kv_heads=4, head_dim=128, page=64, rows=2, chunks=70.7, kv_grad_dtype="bfloat16"),
)


def runs(shape, attention, hbm_layers, kv_dtype, matmul):
    """Loss and gradients of two calls, the second with the pools that the first leaves."""
    sizes = ModelConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=5,  # of four staged ones two pairs: the loops over pairs go round
        num_attention_heads=shape.group * shape.kv_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    model = oomb_jax.models.create(sizes, key=jax.random.key(0), dtype=jnp.bfloat16)
    config = oomb_jax.Config(
        attention=attention,
        page=shape.page,
        chunk=shape.rows * shape.page,
        kv_dtype=kv_dtype,
        kv_grad_dtype=shape.kv_grad_dtype,
        hbm_layers=hbm_layers,
        matmul=matmul,
    )
    tokens = jax.random.randint(jax.random.key(1), (int(shape.chunks * config.chunk) + 1,), 0, 97, jnp.int32)
    pools = oomb_jax.create_pools(model, len(tokens) - 1, config)
    assert (pools.host is None) == (hbm_layers is None)
    if pools.host is not None:
        assert layer_count(pools.host) == layer_count(model.layers) - hbm_layers
        assert {x.sharding.memory_kind for x in pools.host[:4]} == {"pinned_host"}
    step = functools.partial(oomb_jax.value_and_grad, config=config)
    # XLA times cuBLAS's algorithms anew for every program, and takes one or another.
    options = oomb_jax.COMPILER_OPTIONS | {"xla_gpu_autotune_level": 0}
    step = jax.jit(step, donate_argnums=1, compiler_options=options)
    results = []
    for _ in range(2):
        loss, grads, pools = step(model, pools, tokens[:-1], tokens[1:])
        results.append(jax.tree.map(np.asarray, (loss, grads)))
    return results


@pytest.mark.parametrize(("kv_dtype", "matmul"), [(None, "mosaic"), (None, "reference"), ("float8_e4m3fn", "mosaic")])
@pytest.mark.parametrize("attention", [oomb_jax.Dense(), oomb_jax.TopK(pages=3)], ids=["dense", "topk"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"H={shape.head_dim}-S={shape.page}-R={shape.rows}")
def test_pools_on_the_host_give_the_same_bits(shape, attention, kv_dtype, matmul):
    expected, again = runs(shape, attention, None, kv_dtype, matmul)
    assert np.isfinite(expected[0])
    assert all(np.any(x) for x in jax.tree.leaves(expected[1]))
    for results in (again, *runs(shape, attention, 0, kv_dtype, matmul), *runs(shape, attention, 1, kv_dtype, matmul)):
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
