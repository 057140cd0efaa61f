"""Pools in host memory: arrays are taken for such inside a jitted function and stay there; limits."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import oomb_jax
from oomb_jax import pools
from oomb_jax.pallas_kernels.triton_call import in_host_memory
from oomb_jax.pools import PINNED, _host, check_pinned


def test_arrays_in_host_memory_are_known_and_stay():
    host = _host(jax.devices("cpu")[0])
    pool = jax.jit(lambda: lax.empty((4,), jnp.float32), out_shardings=host)()
    seen = []

    def step(pool, x):
        seen.append((in_host_memory(pool), in_host_memory(x)))
        return pool, x + 1

    assert in_host_memory(pool)
    again, x = jax.jit(step, donate_argnums=0)(pool, jnp.ones(3))
    assert in_host_memory(again)
    assert not in_host_memory(x)
    compiled = (
        jax.jit(step, donate_argnums=0).lower(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=host), x).compile()
    )
    assert in_host_memory(compiled(again, x)[0])
    assert seen == [(True, False)] * 2


def test_pools_on_the_host_come_from_one_region(monkeypatch):
    made = []

    def host_array(shape, dtype):
        made.append(jnp.zeros(shape, dtype))
        return made[-1]

    monkeypatch.setattr(pools, "_device", lambda: types.SimpleNamespace(platform="gpu"))
    monkeypatch.setattr(pools, "_host_array", host_array)
    config = oomb_jax.Config(page=16, chunk=64, hbm_layers=1)
    oomb_jax.create_pools(oomb_jax.models.abstract("tiny"), 1000, config)
    # Those of the shapes alone come first.
    region, *arrays = made[-5:]
    assert region.is_deleted()
    assert region.size >= sum(x.nbytes for x in arrays)


def test_pools_that_jax_may_not_pin_are_refused(monkeypatch):
    monkeypatch.delenv(PINNED, raising=False)
    check_pinned(64 * 2**30)
    with pytest.raises(ValueError, match=f"pools of 96.5 GiB .* may pin 64; .* set {PINNED}=98"):
        check_pinned(96 * 2**30 + 2**29)
    monkeypatch.setenv(PINNED, "98")
    check_pinned(96 * 2**30 + 2**29)
