"""The plan: its bytes are those that the step has, its times those that were measured, and what it promises holds."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from oomb_jax import chunked, models, plan
from oomb_jax.chunk import Chunk
from oomb_jax.plan.machine import DEVICES, GIB, SYSTEM, Machine
from oomb_jax.selection import TopK
from oomb_jax.sequence import cut
from oomb_jax.train import setup
from oomb_jax.train.__main__ import USAGE, main, parse
from oomb_jax.train.compiled import pool_copies
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.optimizer import OptimizerConfig, build
from oomb_jax.train.plan import alternatives, decide, longest_context
from oomb_jax.train.step import compile_step
from tests.tolerance import PLANNED_TIME

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "step.json"


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_activations_are_what_the_engine_keeps(remat):
    model = models.abstract("tiny", dtype="bfloat16")
    config = oomb_jax.Config(chunk=64, page=16, remat=remat)
    T = 192

    def recompute(model, pools, tokens):
        sequence = cut(tokens, tokens, None, config)
        chunk = Chunk.of(sequence, jnp.int32(1), config)
        outer, layers = chunked.split(model)
        return chunked._layers_recompute(layers, chunk, pools, outer.embed(sequence.tokens[1]))[1]

    pools = jax.eval_shape(lambda model: oomb_jax.create_pools(model, T, config), model)
    saved = jax.eval_shape(recompute, model, pools, jax.ShapeDtypeStruct((T,), jnp.int32))
    planned = plan.account(plan.Job(model=model, config=config, ctx=T))
    assert planned.phases["reverse"]["activations"] == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(saved))


@pytest.mark.parametrize("seed", range(6))
def test_pools_are_those_that_are_made(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]
    page = int(pick(8, 16))
    config = oomb_jax.Config(
        page=page,
        chunk=page * int(rng.integers(1, 5)),
        attention=pick(oomb_jax.Dense(), TopK(pages=3), TopK(pages=2, scope="kv_head")),
        kv_dtype=pick(None, "float32", "float8_e4m3fn"),
        kv_grad_dtype=pick(None, "bfloat16"),
        hbm_layers=pick(None, 0, 1, 2),
    )
    model, ctx = models.abstract("tiny", dtype="bfloat16"), int(rng.integers(1, 600))
    pools = jax.eval_shape(lambda model: oomb_jax.create_pools(model, ctx, config), model)
    planned = plan.account(plan.Job(model=model, config=config, ctx=ctx))
    size = lambda *arrays: sum(x.size * x.dtype.itemsize for x in arrays if x is not None)
    hbm, host = pools.hbm, pools.host
    both = [layers for layers in (hbm, host) if layers is not None]
    scales = sum(size(layers.k_scale, layers.v_scale) for layers in both)
    touched = sum(size(layers.touched) for layers in both)
    assert planned.hbm["kv"] == (0 if hbm is None else size(hbm.k, hbm.v)) + scales
    assert planned.hbm["kv_gradients"] == (0 if hbm is None else size(hbm.dk, hbm.dv)) + touched
    assert planned.host["kv"] == (0 if host is None else size(host.k, host.v))
    assert planned.host["kv_gradients"] == (0 if host is None else size(host.dk, host.dv))
    assert planned.hbm["selection"] == size(pools.selection, pools.mass)
    assert planned.hbm["total"] == max(planned.peaks.values()) <= sum(planned.hbm.values()) - planned.hbm["total"]


def test_what_a_step_holds_is_planned_to_the_byte():
    model, config = (
        models.abstract("tiny", dtype="bfloat16"),
        oomb_jax.Config(chunk=64, page=16, attention=TopK(pages=3)),
    )
    optimizer = build(OptimizerConfig(), model)
    step, state = compile_step(model, optimizer, config, batch=3, ctx=300, packed=False)
    planned = plan.account(plan.Job(model=model, config=config, ctx=300, batch=3, optimizer=state)).hbm
    for kind in ("weights", "gradients", "optimizer", "tokens"):
        assert planned[kind] == getattr(step.memory, kind), kind
    assert planned["kv"] + planned["kv_gradients"] + planned["selection"] == step.memory.pools


def test_times_are_those_that_were_measured():
    measured = [x for x in json.loads(RESULTS.read_text()) if x["method"] == "chunked" and x["attention"] == "dense"]
    assert len(measured) >= 3
    for record in measured:
        config = oomb_jax.Config(
            chunk=record["chunk"],
            remat=record["remat"],
            grad_dtype=record["grad_dtype"],
            kv_grad_dtype=record["kv_grad_dtype"],
        )
        job = plan.Job(model=models.abstract(record["model"]), config=config, ctx=record["context"])
        seconds = plan.estimate(job, DEVICES["h200"]).total
        assert abs(seconds / record["seconds"] - 1) < PLANNED_TIME, (record["context"], seconds)


def run(machine=None, **settings):
    settings = TrainConfig(model="qwen2.5-7b", attention="topk", save_every=0, implementation="mosaic", **settings)
    return decide(settings, machine or plan.named("h200", 128), models.config(settings.model))


SMALL_STATE = {"optimizer": "adafactor", "master": "stochastic"}


def test_offload_takes_no_layer_more_than_it_must():
    planned = run(ctx=2**20, **SMALL_STATE)
    resident = planned.config.hbm_layers
    assert planned.fits
    assert resident is not None
    assert 0 < resident < 28
    exact = {"kv_dtype": "bfloat16", "kv_grad_dtype": "float32"}
    more = run(ctx=2**20, offload=resident + 1, **exact, **SMALL_STATE)
    assert more.bytes.hbm["total"] > more.machine.hbm
    assert run(ctx=2**16, **SMALL_STATE).config.hbm_layers is None
    assert run(ctx=2**16, offload="all", **SMALL_STATE).config.hbm_layers == 0
    with pytest.raises(ValueError, match=r"offload=29: qwen2\.5-7b has 28 layers"):
        run(ctx=2**16, offload=29)


def test_keys_values_and_their_gradients_become_narrow_only_where_wide_ones_do_not_fit():
    exact = {"kv_dtype": "bfloat16", "kv_grad_dtype": "float32"}
    limits = [
        longest_context(run(ctx=2**20, **given, **SMALL_STATE)) for given in (exact, {"kv_dtype": "bfloat16"}, {})
    ]
    assert run(ctx=limits[0], **SMALL_STATE).notes == ()
    for limit, kv_dtype, notes in (limits[0], None, 1), (limits[1], jnp.float8_e4m3fn, 2):
        narrow = run(ctx=limit + 4096, **SMALL_STATE)
        assert narrow.fits
        assert narrow.config.kv_grad_dtype == jnp.bfloat16
        assert narrow.config.kv_dtype == kv_dtype
        assert len(narrow.notes) == notes
        assert "float8_e4m3fn" in narrow.notes[-1] or kv_dtype is None
        assert longest_context(narrow) == limits[2]
    assert not run(ctx=limits[0] + 4096, **exact, **SMALL_STATE).fits
    assert not run(ctx=limits[2] + 4096, **SMALL_STATE).fits
    # What was said stays, and a model in float32 is left as it is.
    assert run(ctx=limits[0] + 4096, kv_grad_dtype="float32", **SMALL_STATE).narrowed == ("kv_dtype",)
    assert not run(ctx=limits[0] + 4096, dtype="float32", **SMALL_STATE).fits


def test_what_is_said_to_fit_does():
    planned = run(ctx=2**19)
    assert not planned.fits
    with pytest.raises(ValueError, match=r"GiB of the GPU's memory .* what fits: ") as error:
        planned.check()
    ways = alternatives(planned)
    assert ways
    for way in ways:
        assert way in str(error.value)
        command = f"--model qwen2.5-7b --attention topk --save-every 0 --ctx {2**19} --implementation mosaic {way}"
        settings = parse(command.split())
        assert decide(settings, planned.machine, planned.model_config).fits
    context = longest_context(run(ctx=2**19, **SMALL_STATE))
    assert run(ctx=context, **SMALL_STATE).fits
    assert not run(ctx=context + 1, **SMALL_STATE).fits


def test_a_plan_tells_bytes_and_seconds_and_starts_no_device():
    code = (
        "import sys; from oomb_jax.train.__main__ import main; status = main(sys.argv[1:]);"
        "from jax._src import xla_bridge; assert not xla_bridge._backends; sys.exit(status)"
    )
    flags = ["--ctx", "4194304", "--plan", "--json", "--device", "h200", "--host-memory", "128", "--attention", "topk"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["fits"] is False
    assert told["host"]["total"] == sum(told["host"].values()) - told["host"]["total"]
    assert told["hbm"]["total"] >= told["hbm"]["weights"] + told["hbm"]["activations"] > 2e10
    assert told["time"]["total"] == pytest.approx(sum(told["time"].values()) - told["time"]["total"])
    assert told["limits"]["host"] == 128 * GIB - SYSTEM


def test_plan_flags_need_a_plan(capsys):
    assert main(["--json"]) == USAGE
    assert "go with --plan" in capsys.readouterr().err
    assert main(["--plan", "--device", "h300"]) == USAGE
    assert "device='h300': one of h200, h100" in capsys.readouterr().err


def test_a_run_that_cannot_fit_is_refused_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    small = Machine(described="small", platform="cpu", device=None, hbm=60 * 2**20, host=0)
    monkeypatch.setattr(setup, "this", lambda platform: small)
    monkeypatch.setattr(setup, "compile_step", lambda *_, **__: pytest.fail("compiled"))
    assert main(f"--model tiny --ctx 100000 --platform cpu --out {tmp_path / 'run'}".split()) == USAGE
    assert "what fits: ctx=" in capsys.readouterr().err


def test_jax_may_pin_what_the_pools_take(monkeypatch):
    planned = run(ctx=2**20, **SMALL_STATE)
    monkeypatch.delenv(setup.PINNED, raising=False)
    setup.limit_pinned_memory(planned)
    assert planned.pinned <= int(os.environ[setup.PINNED]) * GIB <= planned.pinned + 2 * GIB
    monkeypatch.setenv(setup.PINNED, "64")
    with pytest.raises(ValueError, match=f"{setup.PINNED}=64: .* take 97"):
        setup.limit_pinned_memory(planned)


def test_limits_of_containers_count(tmp_path):
    free = plan.host_available(tmp_path / "none", tmp_path / "none")
    assert free > 2**20
    groups = tmp_path / "groups"
    groups.write_text("9:cpu:/a\n4:memory:/a/b\n0::/c\n")
    # Version 1: the group above is the narrower one. Version 2: no limit.
    for path, limit, usage, cache in (("memory/a/b", 2**40, 0, 0), ("memory/a", 2**20, 2**19, 2**18)):
        directory = tmp_path / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {cache}\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "memory.max").write_text("max\n")
    assert plan.host_available(tmp_path, groups) == 2**19 + 2**18
    (tmp_path / "c" / "memory.max").write_text(f"{2**18}\n")
    (tmp_path / "c" / "memory.current").write_text(f"{2**17}\n")
    (tmp_path / "c" / "memory.stat").write_text("inactive_file 5\n")
    assert plan.host_available(tmp_path, groups) == 2**17 + 5


def test_copies_of_pools_are_found():
    config = oomb_jax.Config(chunk=64, page=16, hbm_layers=1)
    pools = jax.eval_shape(lambda m: oomb_jax.create_pools(m, 256, config), models.abstract("tiny"))
    L, P, M, S, H = pools.hbm.k.shape
    copied = f"  %copy.1 = bf16[{L},{P},{M},{S},{H}]{{4,3,2,1,0}} copy(%p)"
    layer = f"  %copy.2 = bf16[{P},{M},{S},{H}]{{3,2,1,0}} copy(%p)"
    to_host = "  %copy.3 = f32[7]{0:S(5)} copy(%p)"
    fine = [f"  %copy.4 = bf16[{S},{H}]{{1,0}} copy(%p)", f"  %x = bf16[{L},{P},{M},{S},{H}]{{4,3,2,1,0}} parameter(0)"]
    found = pool_copies("\n".join([copied, layer, to_host, *fine]), pools)
    assert [re.sub(r"\D", "", line.split("=")[0]) for line in found] == ["1", "2", "3"]


def test_flags_of_the_program_stay_few():
    from oomb_jax.train.__main__ import PlanFlags

    # Every flag is one more thing to know; a new one takes the place of an old one or has a reason in these numbers.
    assert len(dataclasses.fields(TrainConfig)) <= 45
    assert len(dataclasses.fields(PlanFlags)) <= 6


def test_pools_on_the_host_are_not_compiled_for_a_device_that_is_not_here(capsys):
    flags = "--model tiny --ctx 16384 --attention topk --pages 4 --plan --compile --device h200 --offload all"
    assert main([*flags.split(), "--host-memory", "128"]) == USAGE
    assert "add --offload none" in capsys.readouterr().err
