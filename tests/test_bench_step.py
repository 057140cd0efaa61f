"""What the benchmark of a step refuses before it takes memory."""

import re
from pathlib import Path

import pytest

import oomb_jax
from oomb_jax.plan.machine import GIB, for_pools

MODEL = oomb_jax.models.abstract("qwen2.5-7b")
FREE = 125 * GIB  # of 128


def config(**settings):
    return oomb_jax.Config(attention=oomb_jax.TopK(), kv_grad_dtype="bfloat16", **settings)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")


def test_pools_that_the_host_cannot_hold_are_refused_and_the_named_layers_fit():
    from bench_step import check_host

    with pytest.raises(ValueError, match=r"112\.0 GiB in host memory, which has room for 107\.5") as refused:
        check_host(MODEL, config(hbm_layers=0), 2**20, FREE)
    (layers,) = map(int, re.findall(r"--hbm-layers (\d+)", str(refused.value)))
    assert layers == 2  # 26 of 28 layers, 104 GiB
    check_host(MODEL, config(hbm_layers=layers), 2**20, FREE)
    with pytest.raises(ValueError, match=rf"--hbm-layers {layers},"):
        check_host(MODEL, config(hbm_layers=layers - 1), 2**20, FREE)


def test_a_measurement_begins_with_that(monkeypatch):
    import bench_step

    monkeypatch.setattr(bench_step, "host_available", lambda: FREE)
    monkeypatch.setattr(oomb_jax.models, "create", lambda *_, **__: pytest.fail("made the model first"))
    settings = bench_step.Settings(attention="topk", hbm_layers=0)
    with pytest.raises(ValueError, match=r"--contexts 1048576: pools of 168\.0 GiB"):
        bench_step.measure(settings, 2**20)


def test_pools_that_fit_are_not_refused():
    from bench_step import check_host

    check_host(MODEL, config(hbm_layers=0, kv_dtype="float8_e4m3fn"), 2**20, FREE)
    check_host(MODEL, config(hbm_layers=0), 2**19, FREE)
    check_host(MODEL, config(hbm_layers=0), 2**20, 131 * GIB)
    assert for_pools(131 * GIB) >= 112 * GIB
    check_host(MODEL, config(), 2**20, 0)
