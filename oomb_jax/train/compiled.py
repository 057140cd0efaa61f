"""The step of a plan as the compiler sees it: its memory beside the formula's, and whether it copies a pool.

A GPU that is not here is compiled for from its description; that takes the CUDA plugin, not a GPU.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from oomb_jax.parts import layer_count
from oomb_jax.pools import Pools, pool_shapes
from oomb_jax.train.optimizer import build
from oomb_jax.train.plan import GIB, Plan
from oomb_jax.train.step import compile_step

# Of NVIDIA's data sheets and of `deviceQuery`; shared memory and registers follow from the compute capability.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_core} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_block} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
_HOPPER = {
    "cores": 132, "fpus": 128, "threads": 2048, "shared_core": 233_472, "shared_block": 232_448, "cache": 52_428_800,
    "clock": 1.98, "major": 9, "minor": 0,
}  # fmt: skip
_DEVICES: dict[str, dict[str, Any]] = {
    "h200": _HOPPER | {"name": "NVIDIA H200", "bandwidth": 4_800_000_000_000, "memory": 150_000_000_000},
    "h100": _HOPPER | {"name": "NVIDIA H100 80GB HBM3", "bandwidth": 3_350_000_000_000, "memory": 85_000_000_000},
    "a100-80g": {
        "cores": 108, "fpus": 64, "threads": 2048, "shared_core": 167_936, "shared_block": 166_912,
        "cache": 41_943_040, "clock": 1.41, "major": 8, "minor": 0, "name": "NVIDIA A100-SXM4-80GB",
        "bandwidth": 2_040_000_000_000, "memory": 85_000_000_000,
    },
    "rtx-4090": {
        "cores": 128, "fpus": 128, "threads": 1536, "shared_core": 102_400, "shared_block": 101_376,
        "cache": 75_497_472, "clock": 2.52, "major": 8, "minor": 9, "name": "NVIDIA GeForce RTX 4090",
        "bandwidth": 1_008_000_000_000, "memory": 25_300_000_000,
    },
}  # fmt: skip


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
      ValueError: the device is not here, and its compiler is not installed or pools are on the host.
    """
    hbm_layers = plan.config.hbm_layers
    if device != "this" and hbm_layers is not None and hbm_layers < layer_count(plan.job.model.layers):
        # JAX drops the kind of memory of a device that is not here, so the pools would be compiled into the GPU's.
        raise ValueError(
            f"compile: the pools of all but {hbm_layers} layers are on the host, and for {device}, which is not here, "
            "JAX compiles for the GPU's memory alone; add --offload none, or run it on the device without --device"
        )
    with _compiling_for(device):
        optimizer = build(plan.settings.optimizer_config(), plan.job.model)
        shape = {"batch": plan.job.batch, "ctx": plan.job.ctx, "packed": plan.job.packed}
        step, _ = compile_step(plan.job.model, optimizer, plan.config, **shape)
        pools = pool_shapes(plan.job.model, plan.job.ctx, plan.config)
    phases = {phase: step.pieces[phase] for phase in plan.bytes.phases}
    analyses = {phase: piece.memory_analysis() for phase, piece in phases.items()}
    temporaries = {phase: analysis.temp_size_in_bytes for phase, analysis in analyses.items()}
    host = {phase: analysis.host_temp_size_in_bytes for phase, analysis in analyses.items()}
    # All that lives through the step, and what the fill pass alone hands on from chunk to chunk.
    always = step.memory.total - step.memory.temporaries - plan.pinned
    hbm = {p: always + plan.bytes.phases[p]["representatives"] + temporaries[p] for p in phases}
    copies = [f"{size} bytes of host memory, in {phase}" for phase, size in host.items() if size]
    for phase, piece in phases.items():
        copies += [f"{line}, in {phase}" for line in pool_copies(piece.as_text(), pools)]
    return Compiled(
        temporaries=temporaries,
        host_temporaries=host,
        hbm=hbm | {"total": max(hbm.values())},
        copies=tuple(copies),
    )


def pool_copies(text: str, pools: Pools) -> list[str]:
    """Instructions of a compiled program that copy a pool, or anything into host memory."""
    shapes = set()
    for layers in (pools.hbm, pools.host):
        if layers is not None:
            L, P, M, S, H = layers.k.shape
            # As it is, as kernels see it, and a layer of it.
            for shape in ((L, P, M, S, H), (L * P * M, S, H), (1, P, M, S, H), (P, M, S, H), (P * M, S, H)):
                shapes.add(",".join(map(str, shape)))
    pool = rf"\[(?:{'|'.join(shapes)})\]\S* copy\("
    host = r"S\(5\)\S* copy\("
    return [line.strip()[:120] for line in text.splitlines() if re.search(f"{pool}|{host}", line)]


@contextlib.contextmanager
def _compiling_for(device: str) -> Iterator[None]:
    if device == "this":
        yield
        return
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise ValueError(f"compile: for {device} it takes the CUDA plugin; pip install 'oomb_jax[aot]'")
    # The plugin looks for a GPU's driver otherwise.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    description = _DESCRIPTION.format(**_DEVICES[device])
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=description, topology="1x1x1"
    )
    with jax.default_device(topology.devices[0]):
        yield
