"""The step of a plan as the compiler sees it: its memory beside the formula's, and whether it copies a pool.

A GPU that is not here is compiled for from its description; that takes the CUDA plugin, not a GPU.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax

from oomb_jax.compiler import COMPILER_OPTIONS
from oomb_jax.plan.absent import AbsentGPU
from oomb_jax.plan.memory import staging_slots
from oomb_jax.pools import PAGE_ARRAYS, LayerPools, Pools, pool_shapes
from oomb_jax.train.optimizer import build
from oomb_jax.train.plan import GIB, Plan
from oomb_jax.train.step import compile_here, compile_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler reports of the step."""

    temporaries: dict[str, int]
    """Bytes on the device beside arguments and results, by phase."""
    host_temporaries: dict[str, int]
    hbm: dict[str, int]
    """Bytes on the device by phase, and the most as `total`; arguments and what waits for other phases included."""
    copies: tuple[str, ...]
    """What is copied and should not be."""

    def describe(self, plan: Plan) -> str:
        """For people, beside the plan."""
        lines = [f"{'device memory, GiB':<20}{'plan':>10}{'compiled':>10}"]
        for phase, peak in (plan.bytes.peaks | {"total": plan.bytes.hbm["total"]}).items():
            lines.append(f"{phase:<20}{peak / GIB:>10.2f}{self.hbm[phase] / GIB:>10.2f}")
        return "\n".join([*lines, *(f"copied: {copy}" for copy in self.copies or ("no pool",))])


def compile_plan(plan: Plan, device: str) -> Compiled:
    """Compiles the step of a plan for a device by name, or for `this` machine's.

    Raises:
      ValueError: the device is not here, and its compiler is not installed.
    """
    job = plan.job
    compile = compile_here if device == "this" else _compile_for(AbsentGPU(device))
    optimizer = build(plan.settings.optimizer_config(), job.model)
    shape = {"batch": job.batch, "ctx": job.ctx, "packed": job.packed}
    step, _ = compile_step(job.model, optimizer, plan.config, **shape, compile=compile)
    pools = pool_shapes(job.model, job.ctx, plan.config)
    analyses = {name: piece.memory_analysis() for name, piece in step.pieces.items()}
    temporaries = {phase: analyses[phase].temp_size_in_bytes for phase in plan.bytes.phases}
    host = {phase: analyses[phase].host_temp_size_in_bytes for phase in plan.bytes.phases}
    # All that lives through the step, and what the fill pass alone hands on from chunk to chunk.
    always = step.memory.total - step.memory.temporaries - plan.pinned
    hbm = {p: always + plan.bytes.phases[p]["representatives"] + size for p, size in temporaries.items()}
    copies = []
    for name, piece in step.pieces.items():
        if size := analyses[name].host_temp_size_in_bytes:
            copies.append(f"{size} bytes of host memory, in {name}")
        if size := analyses[name].host_argument_size_in_bytes - analyses[name].host_alias_size_in_bytes:
            copies.append(f"{size} bytes of host memory that are not updated in place, in {name}")
        copies += [f"{line}, in {name}" for line in pool_copies(piece.as_text(), pools, staging_slots(job))]
    return Compiled(
        temporaries=temporaries,
        host_temporaries=host,
        hbm=hbm | {"total": max(hbm.values())},
        copies=tuple(copies),
    )


def pool_copies(text: str, pools: Pools, staged: int = 0) -> list[str]:
    """Instructions of a compiled program that copy a pool or a layer of it, or anything into host memory.

    Args:
      text: the program.
      pools: shapes.
      staged: pages of a buffer for pages from the host. One for as many as a layer has cannot be told from a layer on
        the device, so it hides the copy of one.
    """
    on_host = lambda shape: ":S(5)" in shape or shape.endswith("S(5)}")
    made = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = (\S+) ", text, re.MULTILINE))
    device = _shapes(pools.hbm, layers=pools.host is None or staged != pools.pages)
    host = _shapes(pools.host)
    found = []
    for line in text.splitlines():
        copied = re.search(r"= (\w+\[([\d,]*)\]\S*) copy\((%[\w.-]+)\)", line)
        if copied is None:
            continue
        result, shape, source = copied.groups()
        if on_host(result) or shape in device or (shape in host and on_host(made.get(source, ""))):
            found.append(line.strip()[:120])
    return found


def _shapes(held: LayerPools | None, layers: bool = True) -> set[str]:
    """Of the pools of some layers, as they are and as kernels see them, and of one layer of them."""
    if held is None:
        return set()
    shapes = []
    for L, P, M, S, H in {held.k.shape, held.dk.shape}:
        shapes += [(L, P, M, S, H), (L * P * M, S, H)]
        if layers:
            shapes += [(1, P, M, S, H), (P, M, S, H), (P * M, S, H)]
    return {",".join(map(str, shape)) for shape in shapes}


def _compile_for(gpu: AbsentGPU) -> Callable[..., Any]:
    """`compile_here` for a GPU that is not here."""

    def placed(x: Any) -> Any:
        if not isinstance(x, Pools):
            return gpu.array(*x.shape, dtype=x.dtype)
        on_device = Pools(*jax.tree.map(placed, tuple(x)))
        if on_device.host is None:
            return on_device
        arrays = {name: getattr(on_device.host, name) for name in PAGE_ARRAYS}
        on_host = {name: gpu.array(*x.shape, dtype=x.dtype, memory="pinned_host") for name, x in arrays.items()}
        return on_device._replace(host=on_device.host._replace(**on_host))

    def compile(f: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        arguments = jax.tree.map(placed, arguments, is_leaf=lambda x: isinstance(x, Pools))
        return gpu.compile(f, *arguments, compiler_options=COMPILER_OPTIONS, **options)

    return compile
