"""The plan: its bytes are those that the step has, its times those that were measured, and what it promises holds."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
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
from oomb_jax.plan import machine
from oomb_jax.plan.machine import DEVICES, GIB, Machine, for_pools, named, process
from oomb_jax.selection import TopK
from oomb_jax.sequence import cut
from oomb_jax.train import plan_report, setup
from oomb_jax.train.__main__ import USAGE, main, parse
from oomb_jax.train.compiled import pool_copies
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.optimizer import OptimizerConfig, build
from oomb_jax.train.plan import alternatives, decide, longest_context, ways
from oomb_jax.train.step import Memory, compile_step
from tests.tolerance import PLANNED_BYTES, PLANNED_TIME

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
        _, groups, _ = chunked._layers_recompute(layers, chunk, pools, outer.embed(sequence.tokens[1]))
        return [group.saved for group in groups]

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
    if isinstance(config.attention, TopK):
        config = dataclasses.replace(config, kv_grad_pages=pick(None, 3, 1000))
    model, ctx = models.abstract("tiny", dtype="bfloat16"), int(rng.integers(1, 600))
    pools = jax.eval_shape(lambda model: oomb_jax.create_pools(model, ctx, config), model)
    planned = plan.account(plan.Job(model=model, config=config, ctx=ctx))
    size = lambda *arrays: sum(x.size * x.dtype.itemsize for x in arrays if x is not None)
    hbm, host = pools.hbm, pools.host
    both = [layers for layers in (hbm, host) if layers is not None]
    scales = sum(size(layers.k_scale, layers.v_scale) for layers in both)
    slots = sum(size(*jax.tree.leaves(layers.slots)) for layers in both)
    assert planned.hbm["kv"] == (0 if hbm is None else size(hbm.k, hbm.v)) + scales
    assert planned.hbm["kv_gradients"] == (0 if hbm is None else size(hbm.dk, hbm.dv)) + slots
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
    measured = [x for x in json.loads(RESULTS.read_text()) if x["method"] == "chunked"]
    assert {x["attention"] for x in measured} == {"dense", "topk"}
    assert {x["hbm_layers"] for x in measured} == {None, 0}
    for record in measured:
        config = oomb_jax.Config(
            attention=oomb_jax.TopK(pages=record["pages"]) if record["attention"] == "topk" else oomb_jax.Dense(),
            chunk=record["chunk"],
            remat=record["remat"],
            grad_dtype=record["grad_dtype"],
            kv_dtype=record.get("kv_dtype"),  # records of before that setting
            kv_grad_dtype=record["kv_grad_dtype"],
            hbm_layers=record["hbm_layers"],
        )
        job = plan.Job(model=models.abstract(record["model"]), config=config, ctx=record["context"])
        seconds = plan.estimate(job, DEVICES["h200"], record.get("distinct_pages")).total
        assert abs(seconds / record["seconds"] - 1) < PLANNED_TIME, (record, seconds)


def test_a_process_takes_what_was_measured():
    # Pools in host memory and the process's peak, GiB (benchmarks/results/qwen2.5-*).
    for pools, taken in (0, 5.0), (16, 22.4), (54, 62.8), (220, 234.1):
        assert abs((pools * GIB + process(pools * GIB)) / (taken * GIB) - 1) < PLANNED_BYTES


def run(machine=None, **settings):
    settings = TrainConfig(model="qwen2.5-7b", save_every=0, implementation="mosaic", **settings)
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
    wide = {"kv_dtype": "bfloat16", "kv_grad_pages": 2**20}
    exact = wide | {"kv_grad_dtype": "float32"}
    limits = [longest_context(run(ctx=2**20, **given, **SMALL_STATE)) for given in (exact, wide, {})]
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
        command = f"--model qwen2.5-7b --save-every 0 --ctx {2**19} --implementation mosaic {way}"
        settings = parse(command.split())
        assert decide(settings, planned.machine, planned.model_config).fits
    far = run(ctx=2**24)
    with pytest.raises(ValueError, match=r"what fits: ctx=(\d+) at most, with (.*), or (--model .*)") as error:
        far.check()
    found = re.search(r"ctx=(\d+) at most, with (.*), or (--model .*)", str(error.value))
    assert found is not None
    for command in (f"--ctx {found[1]} {found[2]}", f"--ctx {2**24} {found[3]}"):
        settings = parse(f"--implementation mosaic --save-every 0 {command}".split())
        assert decide(settings, far.machine, models.config(settings.model)).fits
    context = longest_context(run(ctx=2**19, **SMALL_STATE))
    assert run(ctx=context, **SMALL_STATE).fits
    assert not run(ctx=context + 1, **SMALL_STATE).fits


def test_where_gradients_of_all_pages_do_not_fit_there_is_room_for_fewer():
    settings = TrainConfig(
        ctx=4194304, optimizer="adafactor", master="stochastic", remat="full", grad_dtype="bfloat16", save_every=0
    )
    model = models.config(settings.model)
    plans = {host: decide(settings, named("h200", host), model) for host in (200, 251, 300)}
    assert [plan.fits for plan in plans.values()] == [False, True, True]
    pages = plans[251].job.pages
    assert 0.85 * pages <= (plans[251].config.kv_grad_pages or 0) < pages
    assert "--kv-grad-pages" in plans[251].notes[-1]
    assert plans[300].config.kv_grad_pages is None
    every = decide(dataclasses.replace(settings, kv_grad_pages=pages), named("h200", 251), model)
    assert not every.fits


def test_a_plan_tells_bytes_and_seconds_and_starts_no_device():
    code = (
        "import sys; from oomb_jax.train.__main__ import main; status = main(sys.argv[1:]);"
        "from jax._src import xla_bridge; assert not xla_bridge._backends; sys.exit(status)"
    )
    flags = ["--ctx", "4194304", "--plan", "--json", "--device", "h200", "--host-memory", "128"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["fits"] is False
    # What `--ctx` alone means.
    assert told["model"] == "qwen2.5-7b"
    assert told["hbm"]["selection"] > 4 * 2**22 // 128 * 28 * 64
    assert told["hbm_layers"] == 0
    assert re.match(r"what fits: ctx=\d+ at most", told["advice"])
    assert told["host"]["total"] == sum(told["host"].values()) - told["host"]["total"]
    assert told["hbm"]["total"] >= told["hbm"]["weights"] + told["hbm"]["activations"] > 2e10
    assert told["time"]["total"] == pytest.approx(sum(told["time"].values()) - told["time"]["total"])
    pools, pinned = for_pools(128 * GIB), told["host"]["kv"] + told["host"]["kv_gradients"]
    assert told["limits"]["host"] == pools + process(pools)
    assert told["host"]["process"] == process(pinned)


def test_a_way_out_names_what_the_program_then_chooses():
    told = ways(run(ctx=2**20))
    assert "--optimizer adafactor (and then takes --kv-grad-dtype bfloat16)" in told
    flags = {"optimizer": "adafactor", "kv_grad_dtype": "bfloat16"}
    assert run(ctx=2**20, **flags).fits
    assert not run(ctx=2**20, optimizer="adafactor", kv_grad_dtype="float32", kv_dtype="bfloat16").fits


def test_a_plan_for_a_computer_without_a_gpu_says_how_to_plan_for_one(capsys, monkeypatch):
    small = Machine(described="small", platform="cpu", device=None, hbm=2**30, host=0)
    monkeypatch.setattr(plan_report, "this", lambda *_: small)
    assert main(["--ctx", "4194304", "--plan"]) == 0
    assert "--plan --device h200" in capsys.readouterr().out


def test_plan_flags_need_a_plan(capsys):
    assert main(["--json"]) == USAGE
    assert "go with --plan" in capsys.readouterr().err
    assert main(["--plan", "--host-memory", "-5"]) == USAGE
    assert "host_memory=-5: at least 0 GiB" in capsys.readouterr().err
    assert main(["--plan", "--device", "h300"]) == USAGE
    assert "device='h300': one of h200, h100" in capsys.readouterr().err


def test_a_run_that_cannot_fit_is_refused_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    small = Machine(described="small", platform="cpu", device=None, hbm=60 * 2**20, host=0)
    monkeypatch.setattr(setup, "this", lambda platform: small)
    monkeypatch.setattr(setup, "compile_step", lambda *_, **__: pytest.fail("compiled"))
    assert main(f"--model tiny --ctx 100000 --platform cpu --out {tmp_path / 'run'}".split()) == USAGE
    assert "what fits: ctx=" in capsys.readouterr().err


@pytest.mark.parametrize("offload", [9, "none"])
def test_a_step_that_is_larger_as_compiled_is_refused_with_what_fits(offload):
    dtypes = {"kv_dtype": "bfloat16", "kv_grad_dtype": "bfloat16"}
    planned = run(ctx=2**18, offload=offload, **dtypes, **SMALL_STATE)
    assert planned.fits
    held = planned.bytes.hbm["total"]
    taken = lambda layers: run(ctx=2**18, offload=layers, **dtypes, **SMALL_STATE).bytes.hbm["total"]
    pools, over = 16 * GIB, 5 * GIB
    memory = Memory(
        weights=0, gradients=0, optimizer=0, pools=planned.pinned + pools, tokens=0, temporaries=held + over - pools
    )
    setup.check_memory(planned, memory, held + over)
    for limit in held + over - 1, taken(3) + over, taken(3) + over - 1:
        with pytest.raises(ValueError, match=r"(that fits is \d+|take less), or --offload ") as told:
            setup.check_memory(planned, memory, limit)
        layers = int(re.findall(r"--offload (\d+)", str(told.value))[0])
        assert taken(layers) + over <= limit
        assert layers == 27 or taken(layers + 1) + over > limit or layers + 1 == offload
    no_host = dataclasses.replace(planned, machine=dataclasses.replace(planned.machine, host=0))
    for refused, limit in ((no_host, held + over - 1), (planned, taken(0) + over - 1)):
        with pytest.raises(ValueError, match=r"(that fits is \d+|take less)$"):
            setup.check_memory(refused, memory, limit)


def test_a_gpu_has_what_cuda_can_take(monkeypatch):
    told = subprocess.CompletedProcess([], 0, stdout="NVIDIA H200, 4, 143150\n")

    def tool(command, **_):
        assert "--query-gpu=name,memory.used,memory.free" in command
        return told

    monkeypatch.setattr(machine, "_jax_has_gpu", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", tool)
    found = plan.this()
    assert found.device is DEVICES["h200"]
    assert found.hbm == int(0.95 * 143154 * 2**20)
    told.stdout = "NVIDIA H200, 43154, 100000\n"
    assert plan.this().hbm == 100000 * 2**20
    told.stdout = "NVIDIA GB10, [N/A], [N/A]\n"
    assert plan.this().platform == "cpu"  # as without the tool; `--platform gpu` asks JAX


def test_checkpoints_count_on_the_host_and_on_the_disk(tmp_path, capsys, monkeypatch):
    settings = TrainConfig(
        ctx=2**16, implementation="mosaic", grad_dtype="bfloat16", steps=100, save_every=10, keep=3, eval_every=5
    )
    machine = dataclasses.replace(plan.named("h200", 256), disk=600 * GIB)
    planned = decide(settings, machine, models.config(settings.model))
    optimizer = build(settings.optimizer_config(), planned.job.model)
    state = jax.tree.leaves((planned.job.model, jax.eval_shape(optimizer.init, planned.job.model)))
    sizes = [x.size * x.dtype.itemsize for x in state]
    assert planned.bytes.host["checkpoint"] == max(sizes) == 28 * 3584 * 18944 * 4
    assert 0 < planned.bytes.checkpoint - sum(sizes) < 2**21
    assert planned.checkpoints == 5  # three, the best before them, and the next
    assert planned.disk == 5 * planned.bytes.checkpoint < 600 * GIB
    assert planned.fits
    small = decide(settings, dataclasses.replace(machine, disk=300 * GIB), planned.model_config)
    assert small.fits_in_memory
    assert alternatives(small)[:2] == ("--keep 1", "--save-every 0")
    told = r"out=runs/qwen2.5-7b-65536: a checkpoint of qwen2.5-7b takes 99.\d+ GiB, 5 of them .* what fits: --keep 1"
    with pytest.raises(ValueError, match=told):
        small.check()
    once = dataclasses.replace(settings, steps=7)
    assert decide(once, machine, planned.model_config).checkpoints == 1
    # A run's own checkpoints make room for those that follow.
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "5" / "array").write_bytes(bytes(5000))
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert plan.disk_for(tmp_path / "run" / "checkpoints") == 2**20 + 5000
    monkeypatch.setattr(setup, "compile_step", lambda *_, **__: pytest.fail("compiled"))
    assert main(f"--model tiny --ctx 300 --platform cpu --out {tmp_path / 'new'}".split()) == USAGE
    assert "what fits: --save-every 0" in capsys.readouterr().err


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
    # From host memory, and of a buffer of fetched pages, which is on the device.
    from_host = [
        f"  %pool = bf16[{L},{P},{M},{S},{H}]{{4,3,2,1,0:T(8,128)S(5)}} parameter(1)",
        f"  ROOT %copy.5 = bf16[{L},{P},{M},{S},{H}]{{4,3,2,1,0}} copy(%pool)",
    ]
    find = lambda lines, *args: [re.sub(r"\D", "", x.split("=")[0]) for x in pool_copies("\n".join(lines), *args)]
    assert find([copied, layer, to_host, *fine, *from_host], pools) == ["1", "2", "3", "5"]
    assert find([copied, layer, to_host, *fine], pools, P) == ["1", "3"]
    on_host = pools._replace(hbm=None)
    assert find([copied, layer, to_host, *fine, *from_host], on_host) == ["3", "5"]


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the CUDA plugin is here")
def test_compiling_for_an_absent_device_says_what_it_takes(capsys):
    flags = "--model tiny --ctx 16384 --plan --compile --device h200 --host-memory 128"
    assert main(flags.split()) == USAGE
    assert "it takes the CUDA plugin; pip install 'oomb_jax[aot]'" in capsys.readouterr().err


def test_flags_of_the_program_stay_few():
    from oomb_jax.train.__main__ import PlanFlags

    # Every flag is one more thing to know; a new one takes the place of an old one or has a reason in these numbers.
    # 47: `kv_grad_pages`, which a step that ends for want of room names as the way out.
    assert len(dataclasses.fields(TrainConfig)) <= 47
    assert len(dataclasses.fields(PlanFlags)) <= 6
