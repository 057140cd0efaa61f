"""What a run is made of, found from its settings before anything is allocated: device, model, data, memory."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from oomb_jax import models
from oomb_jax.config import Config
from oomb_jax.models import hf_config
from oomb_jax.parts import layer_count
from oomb_jax.plan import Machine, disk_for, host_available, this
from oomb_jax.plan.machine import GIB, for_pools
from oomb_jax.pools import PINNED
from oomb_jax.sequence import chunk_count, chunk_length, top_k
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.data import Data, check_vocabulary, longest, open_data, warn_of_repeats
from oomb_jax.train.optimizer import Optimizer, build
from oomb_jax.train.plan import Plan, decide, gib, pinned_limit
from oomb_jax.train.plan_report import summary
from oomb_jax.train.step import Memory, Step, compile_step

EXPORTED = "model"
"""Where in the run's directory `--export` writes."""

PIN_RATE = 1.4 * GIB
"""Bytes of host memory that the driver pins in a second: 232 GiB took 165 s beside one H200."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """All that is known of a run before its first step."""

    settings: TrainConfig
    """With every default that depends on the device filled in."""

    config: Config
    model_config: models.ModelConfig
    model: Any
    """Shapes of the model."""

    device: Any
    data: Data
    optimizer: Optimizer
    state: Any
    """Shapes of the optimizer's state."""

    step: Step


def prepare(settings: TrainConfig, say: Callable[[str], None]) -> Run:
    """Plans the run, checks its settings against the model and the data, compiles the step, and checks its memory.

    Raises:
      ValueError, FileNotFoundError, ImportError: a setting does not fit; one line says which, why, and what would.
    """
    planned = make_plan(settings).check()
    limit_pinned_memory(planned)
    device = find_device(settings.platform)
    settings, config, model_config, model = planned.settings, planned.config, planned.model_config, planned.job.model
    optimizer = build(settings.optimizer_config(), model)
    data = open_data(settings.data, tokenizer=settings.tokenizer, heldout=settings.heldout)
    check_vocabulary(data, model_config.vocab_size)
    warn_of_repeats(data.train, settings.ctx, pack=settings.pack)
    say(describe(planned, data, device))
    step, state = compile_step(model, optimizer, config, batch=settings.batch, ctx=settings.ctx, packed=settings.pack)
    limit = memory_limit(device)
    say(describe_memory(step.memory, limit, planned))
    check_memory(planned, step.memory, limit)
    if planned.pinned:
        say(f"{'host':>10}  pinning {gib(planned.pinned)} for pools, about {planned.pinned / PIN_RATE:.0f} s")
    return Run(
        settings=settings,
        config=config,
        model_config=model_config,
        model=model,
        device=device,
        data=data,
        optimizer=optimizer,
        state=state,
        step=step,
    )


def make_plan(settings: TrainConfig) -> Plan:
    """The plan for this machine, before JAX starts on it."""
    machine = this(settings.platform)
    if settings.platform == "gpu" and machine.platform == "cpu":
        # A GPU that only JAX knows, or none: then this raises.
        device = find_device(settings.platform)
        machine = Machine(
            described=device.device_kind,
            platform="gpu",
            device=None,
            hbm=memory_limit(device),
            host=for_pools(host_available()),
        )
    machine = dataclasses.replace(machine, disk=disk_for(settings.directory / "checkpoints"))
    return decide(settings, machine, find_model(settings))


def limit_pinned_memory(planned: Plan) -> None:
    """Lets JAX pin as much host memory as the pools take: it reads the limit when it starts on a GPU, and takes regions
    of powers of two up to it, which it never gives back.

    Raises:
      ValueError: the limit is set from outside, and too low.
    """
    if not planned.pinned:
        return
    needed = pinned_limit(planned)
    given = os.environ.setdefault(PINNED, str(needed))
    if float(given) < needed:
        raise ValueError(f"{PINNED}={given}: the pools in host memory take {needed}; leave it unset, or raise it")


def check_directory(settings: TrainConfig) -> None:
    """Raises ValueError where the run cannot write into its directory, or what it holds does not fit `--resume`."""
    directory = settings.directory
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"out={directory}: {existing} is not a directory that can be written to; use another --out")
    exported = directory / EXPORTED
    if settings.export and exported.exists() and not exported.is_dir():
        raise ValueError(f"export: {exported} is not a directory; remove it, or use another --out")
    steps = sorted(int(path.name) for path in (directory / "checkpoints").glob("*") if path.name.isdigit())
    if steps and not settings.resume:
        raise ValueError(
            f"out={directory}: holds a run that is saved at step {steps[-1]}; go on with it (--resume), use another "
            "--out, or remove it"
        )
    if settings.export and not settings.resume and any(exported.glob("*.safetensors")):
        raise ValueError(f"export: {exported} holds a trained model; move it away, or use another --out")
    if settings.resume and not steps:
        raise ValueError(f"out={directory}: no finished checkpoint to resume from; start without --resume")
    for extra, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        if getattr(settings, extra) and importlib.util.find_spec(package) is None:
            raise ValueError(f"{extra}: needs the extra; pip install 'oomb_jax[{extra}]'")


def find_device(platform: str) -> Any:
    """The device to run on; a ValueError where the platform that is asked for is not there."""
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # or JAX would start on a GPU too, and take its memory
    try:
        return jax.devices(None if platform == "auto" else platform)[0]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"platform={platform}: JAX finds no such device ({reason}); install the extra cuda13 or cuda12 on a "
            "machine with an NVIDIA GPU, or use --platform cpu"
        ) from None


def find_model(settings: TrainConfig) -> models.ModelConfig:
    """The model's configuration, checked against the directory of the weights."""
    directory = Path(settings.model)
    config = (
        hf_config.read(directory, ctx=settings.ctx)
        if settings.model not in models.names() and directory.is_dir()
        else models.config(settings.model)
    )
    weights = weights_directory(settings)
    if weights is not None and weights != directory:
        other = hf_config.read(weights, ctx=settings.ctx)
        pairs = [(f.name, getattr(config, f.name), getattr(other, f.name)) for f in dataclasses.fields(config)]
        # Which tokens begin and end a text, and how weights are drawn, does not change what the weights mean.
        cosmetic = ("bos_token_id", "eos_token_id", "initializer_range")
        if different := [f"{n} {a} and {b}" for n, a, b in pairs if a != b and n not in cosmetic]:
            raise ValueError(
                f"weights={weights}: not weights of {settings.model}, they differ in {'; '.join(different)}; "
                f"use --model {weights}"
            )
    return config


def weights_directory(settings: TrainConfig) -> Path | None:
    """The directory to load weights from; None for random ones."""
    if settings.weights == "random":
        return None
    if settings.weights is not None:
        return Path(settings.weights)
    return None if settings.model in models.names() else Path(settings.model)


def create_model(run: Run) -> models.Qwen2:
    """The model's first weights: loaded, or random."""
    directory = weights_directory(run.settings)
    dtype = run.settings.dtype
    if directory is None:
        return models.create(run.model_config, key=jax.random.key(run.settings.seed), dtype=jnp.dtype(dtype))
    loaded = models.load(directory, dtype=jnp.dtype(dtype), ctx=run.settings.ctx)
    # The step is compiled for the run's model, whose configuration may differ from the directory's in what is cosmetic.
    return jax.tree.unflatten(jax.tree.structure(run.model), jax.tree.leaves(loaded))


def memory_limit(device: Any) -> int:
    """Bytes that a run may take on the device: what its allocator may hand out, on a CPU what the host has free."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return psutil.virtual_memory().available


def check_memory(planned: Plan, memory: Memory, limit: int) -> None:
    """Raises ValueError where the step as compiled does not fit on the device, naming what does."""
    total = on_device(planned, memory)
    if total <= limit:
        return
    settings, config = planned.settings, planned.config
    chunk = chunk_length(settings.ctx, config)
    growing = memory.pools + memory.tokens - planned.pinned
    per_chunk = growing / chunk_count(settings.ctx, config)
    fits = int((limit - (total - growing)) / per_chunk) * chunk
    way_out = (
        f"the largest ctx that fits is {fits}"
        if fits > 0
        else "no ctx fits: a smaller model, --optimizer adafactor, --master stochastic or --remat full take less"
    )
    if (fewer := _fewer_layers(planned, total - planned.bytes.hbm["total"], limit)) is not None:
        way_out += f", or --offload {fewer}, which keeps the pools of {fewer} layers there"
    raise ValueError(
        f"ctx={settings.ctx}: a step of {settings.model} takes {gib(total)} as compiled, {gib(growing)} of it for "
        f"keys, values and their gradients, and {gib(limit)} is there; {way_out}"
    )


def _fewer_layers(planned: Plan, over: int, limit: int) -> int | None:
    """The most layers, fewer than now, with whose pools on the device a step fits in `limit` that takes `over` bytes
    more than its plan says. None: no number of them does."""
    if planned.machine.platform != "gpu":
        return None
    # What the program chose by itself it chooses anew.
    open_again = dataclasses.replace(planned.settings, **dict.fromkeys(planned.narrowed))
    resident = layer_count(planned.job.model.layers) - planned.job.host_layers
    for layers in reversed(range(resident)):
        other = decide(dataclasses.replace(open_again, offload=layers), planned.machine, planned.model_config)
        if other.fits and other.bytes.hbm["total"] + over <= limit:
            return layers
    return None


def on_device(planned: Plan, memory: Memory) -> int:
    """Bytes of a step without the pools in host memory."""
    return memory.total - planned.pinned


def describe(planned: Plan, data: Data, device: Any) -> str:
    """What a run does, for people."""
    settings, config, model = planned.settings, planned.config, planned.job.model
    chunks, length = chunk_count(settings.ctx, config), chunk_length(settings.ctx, config)
    weights = weights_directory(settings)
    heldout = f", {data.heldout.tokens:,} held out" if data.heldout else ""
    attention = "dense attention"
    if settings.attention == "topk":
        attention = f"attention to the own chunk and the best {settings.pages} earlier pages"
        if top_k(settings.ctx, config) is None:
            attention += ", which are all there are"
    rows = {
        "model": f"{settings.model}, {models.parameter_count(model):,} parameters in {settings.dtype}, "
        + (f"weights from {weights}" if weights else f"random weights (seed {settings.seed})"),
        "device": f"{device.device_kind} ({device.platform})",
        "context": f"{settings.ctx:,} tokens in {chunks:,} chunks of {length:,}, pages of {settings.page}",
        "data": f"{settings.data}, {data.tokens:,} tokens{heldout}" + (", packed" if settings.pack else ""),
        "steps": f"{settings.steps:,} of {settings.batch} x {settings.ctx:,} tokens, {settings.optimizer}, "
        f"learning rate {settings.learning_rate:g}, {settings.schedule}",
        "method": f"{attention}, remat {settings.remat}",
        "plan": summary(planned),
        "out": f"{settings.directory}",
    }
    notes = list(planned.notes)
    if data.heldout and (most := longest(data.heldout, pack=settings.pack)) < settings.ctx:
        notes.append(f"held-out text is not repeated: it is evaluated in sequences of {most:,} tokens")
    rows |= {f"note {number}": note for number, note in enumerate(notes, 1)}
    return "\n".join(f"{name:>10}  {value}" for name, value in rows.items())


def describe_memory(memory: Memory, limit: int, planned: Plan) -> str:
    """Bytes of a step as compiled by kind, for people."""
    kinds = dataclasses.asdict(memory) | {"pools": memory.pools - planned.pinned}
    told = ", ".join(f"{name} {gib(value)}" for name, value in kinds.items())
    return f"{'compiled':>10}  {gib(on_device(planned, memory))} of {gib(limit)}: {told}"


def metadata(run: Run) -> dict[str, Any]:
    """What is saved with a checkpoint, so that another run's is recognised."""
    return {
        "model": json.loads(json.dumps(dataclasses.asdict(run.model_config), default=str)),
        "settings": json.loads(json.dumps(dataclasses.asdict(run.settings), default=str)),
        "versions": {"jax": jax.__version__, "numpy": np.__version__},
    }
