"""The plan of a run: where its pools go, whether it fits, how long a step takes, and what would fit instead.

Made from the settings alone, in about a second, without starting JAX on a device.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax

from oomb_jax import models
from oomb_jax.config import Config
from oomb_jax.parts import layer_count
from oomb_jax.plan import Bytes, Job, Machine, Seconds, account, estimate
from oomb_jax.plan.machine import process
from oomb_jax.sequence import chunk_length, top_k
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.optimizer import OptimizerConfig, build

GIB = 2**30
CHUNK = {"cpu": 1024, "gpu": 4096}
DTYPE: dict[str, Any] = {"cpu": "float32", "gpu": "bfloat16"}

LONGEST = 2**28
"""Tokens at which the search for the longest context ends."""

# What takes less memory, the most harmless first: how a run says it, and the settings.
CHANGES: dict[str, dict[str, Any]] = {
    "--offload auto": {"offload": "auto"},
    "--keep 1": {"keep": 1},
    "--save-every 0": {"save_every": 0},
    "--kv-grad-dtype bfloat16": {"kv_grad_dtype": "bfloat16"},
    "--remat full": {"remat": "full"},
    "--grad-dtype bfloat16": {"grad_dtype": "bfloat16"},
    "--kv-dtype float8_e4m3fn": {"kv_dtype": "float8_e4m3fn"},
    "--master stochastic": {"master": "stochastic"},
    "--optimizer adafactor": {"optimizer": "adafactor", "b1": None, "b2": None, "momentum": None},
}

# What the program chooses by itself for a bfloat16 model, one after the other, where the more exact does not fit and
# nothing was said: the setting, its value, and what is told of it.
NARROWER: dict[str, tuple[Any, str]] = {
    "kv_grad_dtype": (
        "bfloat16",
        "gradients of keys and values are summed in bfloat16, for float32 does not fit (--kv-grad-dtype)",
    ),
    "kv_dtype": (
        "float8_e4m3fn",
        "keys and values of earlier chunks are kept in float8_e4m3fn, for bfloat16 does not fit (--kv-dtype)",
    ),
}


GRADIENTS_AT_ONCE = (0.85, 0.875, 0.9, 0.925, 0.95, 0.975)
"""Shares of a layer's pages that may hold a gradient at once, where room for all does not fit: the largest that does
is taken. Of 262,144 tokens 0.94 did with pages chosen at random, and 0.84 with those that a model chose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a run before it begins."""

    settings: TrainConfig
    """With every default that depends on the machine filled in."""
    config: Config
    """Settings of the method, placement of the pools included."""
    model_config: models.ModelConfig
    machine: Machine
    job: Job
    bytes: Bytes
    narrowed: tuple[str, ...] = ()
    """Settings that the program chose: of `NARROWER`, which change a rounding, and `kv_grad_pages`."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is told of them."""
        fewer = (
            f"{self.settings.kv_grad_pages or 0:,} of {self.job.pages:,} pages of a layer can hold gradients at once, "
            "as all do not fit; a step that needs more ends after its fill pass (--kv-grad-pages)"
        )
        return tuple(NARROWER[name][1] if name in NARROWER else fewer for name in self.narrowed)

    @property
    def checkpoints(self) -> int:
        """Checkpoints that are on the disk at once: those kept, the best of the others, and one being written."""
        if not self.settings.save_every:
            return 0
        made = -(-self.settings.steps // self.settings.save_every)
        return min(made, self.settings.keep + (self.settings.eval_every > 0) + 1)

    @property
    def disk(self) -> int:
        """Bytes that checkpoints and the exported model take on the disk, at most."""
        return self.checkpoints * self.bytes.checkpoint + self.exported

    @property
    def exported(self) -> int:
        """Bytes of the exported model."""
        return self.bytes.hbm["weights"] if self.settings.export else 0

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice."""
        return self.fits_in_memory and (self.machine.disk is None or self.disk <= self.machine.disk)

    @property
    def fits_in_memory(self) -> bool:
        """Whether the memory suffices."""
        hbm, host = self.bytes.hbm["total"], self.bytes.host["total"]
        if self.machine.platform == "cpu":
            return hbm + host <= self.machine.hbm
        return hbm <= self.machine.hbm and host <= self.machine.host

    @property
    def host(self) -> dict[str, int]:
        """Bytes of host memory by kind; with a GPU also those that the process takes beside pools and checkpoints."""
        kinds = dict(self.bytes.host)
        if self.machine.platform == "gpu":
            kinds["process"] = process(self.pinned)
        total = kinds.pop("total") + kinds.get("process", 0)
        return kinds | {"total": total}

    @property
    def host_limit(self) -> int:
        """Bytes of host memory that there are for all kinds of `host`."""
        return self.machine.host + (process(self.machine.host) if self.machine.platform == "gpu" else 0)

    @property
    def pinned(self) -> int:
        """Bytes of pools in host memory."""
        return self.bytes.host["kv"] + self.bytes.host["kv_gradients"]

    def seconds(self, distinct: float | None = None) -> Seconds | None:
        """Of a step; None where the rates of the device are not known."""
        return None if self.machine.device is None else estimate(self.job, self.machine.device, distinct)

    def check(self) -> "Plan":
        """The same plan.

        Raises:
          ValueError: it does not fit; says what would.
        """
        if self.fits:
            return self
        if self.fits_in_memory:
            assert self.machine.disk is not None
            exported = f" and the exported model {gib(self.exported)}" if self.exported else ""
            raise ValueError(
                f"out={self.settings.out}: a checkpoint of {self.settings.model} takes {gib(self.bytes.checkpoint)}, "
                f"{self.checkpoints} of them on the disk at once{exported}; {gib(self.machine.disk)} is there; another "
                f"--out, or {ways(self)}"
            )
        hbm, host = self.bytes.hbm["total"], self.bytes.host["total"]
        there = f"{gib(self.machine.hbm)} is there, and no GPU (`--plan --device h200` plans for one that is not here)"
        needs = f"{gib(hbm + host)}"
        if self.machine.platform == "gpu":
            needs = f"{gib(hbm)} of the GPU's memory and {gib(host)} of the host's"
            there = f"{gib(self.machine.hbm)} and {gib(self.machine.host)} are there"
        raise ValueError(
            f"ctx={self.settings.ctx}: a step of {self.settings.model} takes {needs}; {there}; {ways(self)}"
        )


def decide(settings: TrainConfig, machine: Machine, model_config: models.ModelConfig) -> Plan:
    """The plan for these settings on a machine. As many layers' pools as fit stay on the device, unless the settings
    say how many; what does not fit and was left open becomes narrower, see `NARROWER`."""
    config = settings.method(CHUNK[machine.platform])
    settings = dataclasses.replace(
        settings,
        dtype=settings.dtype or DTYPE[machine.platform],
        chunk=chunk_length(settings.ctx, config),
        out=settings.directory,
    )
    asked = plan = _placed(settings, config, machine, model_config)
    for name, (dtype, _) in NARROWER.items():
        if plan.fits or settings.dtype != "bfloat16":
            break
        if getattr(settings, name) is None:
            narrowed = (*plan.narrowed, name)
            settings = dataclasses.replace(settings, **{name: dtype})
            config = dataclasses.replace(config, **{name: dtype})
            plan = dataclasses.replace(_placed(settings, config, machine, model_config), narrowed=narrowed)
    if not plan.fits and top_k(settings.ctx, config) is not None and settings.kv_grad_pages is None:
        narrowed = (*plan.narrowed, "kv_grad_pages")
        for share in GRADIENTS_AT_ONCE:
            room = {"kv_grad_pages": math.ceil(share * plan.job.pages)}
            fewer = dataclasses.replace(settings, **room), dataclasses.replace(config, **room)
            placed = dataclasses.replace(_placed(*fewer, machine, model_config), narrowed=narrowed)
            if not placed.fits:
                break
            plan = placed
    return plan if plan.fits else asked


def _placed(settings: TrainConfig, config: Config, machine: Machine, model_config: models.ModelConfig) -> Plan:
    model, state = _shapes(model_config, settings.dtype, settings.optimizer_config())
    layers = layer_count(model.layers)

    def plan(resident: int | None) -> Plan:
        placed = dataclasses.replace(config, hbm_layers=resident)
        job = Job(
            model=model,
            config=placed,
            ctx=settings.ctx,
            batch=settings.batch,
            packed=settings.pack,
            optimizer=state,
            cpu=machine.platform == "cpu",
            checkpoints=settings.save_every > 0,
        )
        return Plan(
            settings=settings,
            config=placed,
            model_config=model_config,
            machine=machine,
            job=job,
            bytes=account(job),
        )

    if settings.offload in ("none", "all"):
        return plan(None if settings.offload == "none" else 0)
    if settings.offload != "auto":
        if settings.offload > layers:
            raise ValueError(f"offload={settings.offload}: {settings.model} has {layers} layers; at most {layers}")
        return plan(settings.offload)
    everything = plan(None)
    if everything.fits or machine.platform == "cpu":
        return everything
    # Each layer more takes its pools, so the most that fit are found by halving.
    low, high = 0, layers - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan(middle).bytes.hbm["total"] <= machine.hbm else (low, middle - 1)
    return plan(low)


@functools.lru_cache(maxsize=32)
def _shapes(model_config: models.ModelConfig, dtype: str, optimizer: OptimizerConfig) -> tuple[Any, Any]:
    model = models.abstract(model_config, dtype=dtype)
    return model, jax.eval_shape(build(optimizer, model).init, model)


def longest_context(plan: Plan) -> int:
    """The largest multiple of the chunk that fits, all else equal; 0 where not even one does."""
    chunk = plan.settings.chunk
    assert chunk is not None  # filled in by `decide`
    settings = dataclasses.replace(plan.settings, **dict.fromkeys(plan.narrowed))
    fits = lambda n: decide(dataclasses.replace(settings, ctx=n * chunk), plan.machine, plan.model_config).fits
    low, high = 0, LONGEST // chunk
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * chunk


def alternatives(plan: Plan) -> tuple[str, ...]:
    """The fewest changes of settings with which the same context fits, up to three ways; empty where none does."""
    return tuple(told for told, _ in _fitting(plan))


def _fitting(plan: Plan) -> list[tuple[str, Plan]]:
    """The same, each with its plan."""
    settings, changes = plan.settings, _changes(plan)
    for count in range(1, len(changes) + 1):
        found = []
        for names in itertools.combinations(changes, count):
            changed = {name: value for told in names for name, value in changes[told].items()}
            other = decide(dataclasses.replace(settings, **changed), plan.machine, plan.model_config)
            if other.fits:
                found.append((" ".join(names), other))
        if found:
            return found[:3]
    return []


def _with_what_it_takes(told: str, other: Plan) -> str:
    """A way out, and what the program then chooses besides."""
    chosen = [f"--{name.replace('_', '-')} {getattr(other.settings, name)}" for name in other.narrowed]
    return f"{told} (and then takes {' '.join(chosen)})" if chosen else told


def _changes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Those of `CHANGES` that may help."""
    fits_on_disk = plan.machine.disk is None or plan.disk <= plan.machine.disk
    return {
        told: change
        for told, change in CHANGES.items()
        if any(getattr(plan.settings, name) != value for name, value in change.items() if value is not None)
        and not (told == "--keep 1" and fits_on_disk)
    }


def ways(plan: Plan) -> str:
    """What fits instead, for people."""
    found = [f"ctx={ctx} at most"] if (ctx := longest_context(plan)) else []
    found += [_with_what_it_takes(*way) for way in _fitting(plan)]
    if not found:
        changes = _changes(plan)
        everything = {name: value for change in changes.values() for name, value in change.items()}
        changed = decide(dataclasses.replace(plan.settings, **everything), plan.machine, plan.model_config)
        smaller = _smaller_model(plan)
        if not (ctx := longest_context(changed)):
            told = f"no context of {plan.settings.model} fits there"
            return f"{told}; what does: {smaller[0]}" if smaller else told
        found = [f"ctx={ctx} at most, with {' '.join(changes)}", *smaller]
    return f"what fits: {', or '.join(found)}"


def _smaller_model(plan: Plan) -> tuple[str, ...]:
    """The largest named model with which the same context fits, and the fewest changes that takes."""
    size = lambda config: models.parameter_count(models.abstract(config))
    smaller = {name: n for name in models.names() if (n := size(models.config(name))) < size(plan.model_config)}
    for name in sorted(smaller, key=lambda name: -smaller[name]):
        settings = dataclasses.replace(plan.settings, model=name)
        other = decide(settings, plan.machine, models.config(name))
        if other.fits:
            return (f"--model {name}",)
        if found := alternatives(other):
            return (f"--model {name} {found[0]}",)
    return ()


def gib(count: int) -> str:
    """Bytes in GiB, for people."""
    return f"{count / GIB:.2f} GiB"


def pinned_limit(plan: Plan) -> int:
    """GiB that JAX may pin: what the pools take, and one for the arrays that pass through on their way."""
    return math.ceil(plan.pinned / GIB) + 1
