"""A plan for people and for programs: `python -m oomb_jax.train --plan`."""

import dataclasses
import json
from typing import Any

from oomb_jax import models
from oomb_jax.parts import layer_count
from oomb_jax.plan import Seconds, disk_for, named, this
from oomb_jax.sequence import top_k
from oomb_jax.train.config import TrainConfig
from oomb_jax.train.plan import GIB, Plan, alternatives, decide, gib, longest_context, ways


def as_json(plan: Plan, distinct: float | None = None) -> dict[str, Any]:
    """The plan as plain values: bytes under `hbm` and `host`, seconds under `time`."""
    seconds = plan.seconds(distinct)
    return {
        "fits": plan.fits,
        "model": plan.settings.model,
        "ctx": plan.settings.ctx,
        "machine": plan.machine.described,
        "hbm": plan.bytes.hbm,
        "host": plan.host,
        "hbm_peaks": plan.bytes.peaks,
        "disk": {
            "checkpoint": plan.bytes.checkpoint,
            "checkpoints": plan.checkpoints,
            "export": plan.exported,
            "total": plan.disk,
        },
        "limits": {"hbm": plan.machine.hbm, "host": plan.host_limit, "disk": plan.machine.disk},
        "hbm_layers": plan.config.hbm_layers,
        "time": None if seconds is None else seconds.phases | {"total": seconds.total},
        "time_measured": plan.machine.device is not None and plan.machine.device.measured,
        "moved": None if seconds is None else {way: round(value) for way, value in seconds.moved.items()},
        "flops": None if seconds is None else seconds.flops,
        "distinct_pages": None if seconds is None else seconds.distinct,
        "largest_ctx": longest_context(plan),
        "alternatives": [] if plan.fits else list(alternatives(plan)),
        "advice": None if plan.fits else ways(plan),
        "notes": list(plan.notes),
    }


def describe(plan: Plan, distinct: float | None = None) -> str:
    """The plan as a table, for people."""
    settings, used = plan.settings, plan.bytes
    chunks = f"{plan.job.chunks:,} chunks of {settings.chunk:,}"
    lines = [
        f"{settings.model}, {settings.ctx:,} tokens in {chunks}, {_attention(plan)}, remat {settings.remat}, "
        f"{settings.optimizer}",
        plan.machine.described,
        "",
        _row("device memory, GiB", *used.phases),
    ]
    for kind in used.hbm:
        values = [kinds[kind] for kinds in used.phases.values()] if kind != "total" else list(used.peaks.values())
        if any(values):
            lines.append(_row(kind, *(f"{value / GIB:.2f}" if value else "" for value in values)))
    lines += [f"{'':<20} of {plan.machine.hbm / GIB:.1f}", ""]
    lines.append("host memory, GiB")
    lines += [_row(kind, f"{value / GIB:.2f}") for kind, value in plan.host.items() if value or kind == "total"]
    if plan.machine.platform == "gpu":
        lines.append(f"{'':<20} of {plan.host_limit / GIB:.1f}, {_placement(plan)}")
    if plan.disk:
        room = "" if plan.machine.disk is None else f" of {plan.machine.disk / GIB:.1f}"
        each = {"checkpoint": plan.bytes.checkpoint, "exported model": plan.exported}
        lines += ["", "disk, GiB", *(_row(kind, f"{value / GIB:.2f}") for kind, value in each.items() if value)]
        lines.append(_row("total", f"{plan.disk / GIB:.2f}") + f"{room}, checkpoints at once: {plan.checkpoints}")
    lines.append("")
    lines += _time(plan, plan.seconds(distinct), distinct)
    lines += [f"note: {note}" for note in plan.notes]
    if plan.fits:
        lines.append(f"fits; the largest context that does with these settings is {longest_context(plan):,}")
    else:
        lines.append(f"does not fit; {ways(plan)}")
        if plan.machine.platform == "cpu":
            lines.append("for a GPU that is not here: --plan --device h200")
    return "\n".join(lines)


def _time(plan: Plan, seconds: Seconds | None, distinct: float | None) -> list[str]:
    if seconds is None:
        return ["time is not estimated: the rates of this device are not known", ""]
    assert plan.machine.device is not None
    source = "from rates measured on one" if plan.machine.device.measured else "estimated by the data sheet"
    lines = [f"time of a step, s ({source})"]
    lines += [_row(name, f"{value:.2f}") for name, value in seconds.phases.items() if value]
    lines.append(_row("total", f"{seconds.total:.2f}"))
    tokens = plan.settings.batch * plan.settings.ctx
    lines.append(
        f"{'':<20} {tokens / seconds.total:,.0f} tokens/s; {seconds.flops / 1e15:,.3g} PFLOP, "
        f"{seconds.flops / seconds.total / 1e12:.0f} TFLOP/s"
    )
    if plan.config.implementation == "reference":
        lines.append("  with the kernels; --implementation reference, plain JAX, is many times slower")
    if any(seconds.moved.values()):
        to_device, to_host = (seconds.moved[way] / GIB for way in ("to_device", "to_host"))
        lines.append(f"  {to_device:,.0f} GiB to the device and {to_host:,.0f} GiB back over the link")
        if top_k(plan.settings.ctx, plan.config) is not None:
            guess = "a guess: pages chosen at random; text chooses fewer" if distinct is None else "as given"
            lines.append(f"  {seconds.distinct:,.0f} distinct pages of a chunk and layer, mean ({guess})")
    return [*lines, ""]


def _attention(plan: Plan) -> str:
    if plan.settings.attention == "dense":
        return "dense attention"
    return f"the best {plan.settings.pages} pages"


def _placement(plan: Plan) -> str:
    layers = layer_count(plan.job.model.layers)
    if not plan.job.host_layers:
        return "pools of all layers on the device"
    return f"pools of {layers - plan.job.host_layers} of {layers} layers on the device, the others in host memory"


def summary(plan: Plan) -> str:
    """The plan in a line, for people."""
    told = f"{gib(plan.bytes.hbm['total'])} of {gib(plan.machine.hbm)} on the device"
    if plan.machine.platform == "gpu":
        told += f", {gib(plan.host['total'])} of {gib(plan.host_limit)} in host memory, {_placement(plan)}"
    seconds = plan.seconds()
    return told if seconds is None else f"{told}; about {seconds.total:,.1f} s a step"


def show(settings: TrainConfig, model_config: models.ModelConfig, flags: Any) -> int:
    """Prints the plan that the flags of the command line ask for; returns the exit status."""
    if flags.device == "this":
        machine = this(settings.platform, flags.host_memory)
        machine = dataclasses.replace(machine, disk=disk_for(settings.directory / "checkpoints"))
    else:
        machine = named(flags.device, flags.host_memory)
    plan = decide(settings, machine, model_config)
    compiled = None
    if flags.compile:
        from oomb_jax.train.compiled import compile_plan

        compiled = compile_plan(plan, flags.device)
    if flags.json:
        more = {} if compiled is None else {"compiled": dataclasses.asdict(compiled)}
        print(json.dumps(as_json(plan, flags.distinct_pages) | more, indent=2))
    else:
        print(describe(plan, flags.distinct_pages))
        if compiled is not None:
            print(f"\n{compiled.describe(plan)}")
    return 0 if compiled is None or not compiled.copies else 1


def _row(name: str, *values: str) -> str:
    return f"{name:<20}" + "".join(f"{value:>10}" for value in values)
