"""Compiles for an NVIDIA GPU that is not here, from its description. That takes the CUDA plugin, not a GPU.

Uses private parts of JAX, as there is no public way yet: for the devices of a topology it compiles all arrays into the
GPU's memory, whatever memory they are said to lie in.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src import compiler
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

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


@dataclasses.dataclass(frozen=True)
class AbsentGPU:
    """A GPU of `oomb_jax.plan.DEVICES`, to be compiled for. Made before JAX starts on any device."""

    name: str

    def __post_init__(self):
        if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
            raise ValueError(f"compile: for {self.name} it takes the CUDA plugin; pip install 'oomb_jax[aot]'")
        # The plugin looks for a GPU's libraries otherwise, when JAX starts.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

    def array(self, *shape: int, dtype: DTypeLike = "bfloat16", memory: str | None = None) -> jax.ShapeDtypeStruct:
        """An argument of `compile`, in the GPU's memory, or in that of the kind `memory`."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(memory))

    def sharding(self, memory: str | None = None) -> NamedSharding:
        """Where an array lies."""
        return NamedSharding(self._mesh, PartitionSpec(), memory_kind=memory)

    def compile(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        compiler_options: Mapping[str, Any] | None = None,
        keywords: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "Executable":
        """The executable of a function.

        Args:
          function: of arrays.
          arguments: trees of what `array` makes.
          compiler_options: as in `jax.jit`.
          keywords: more arguments, by name.
          options: those of `jax.jit`.
        """
        with jax.sharding.use_abstract_mesh(self._mesh):
            traced = jax.jit(function, **options).trace(*arguments, **(keywords or {}))
            lowered = traced.lower(lowering_platforms=("cuda",))
        options_ = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, env_options_overrides=dict(compiler_options or {})
        )
        (device,) = self._topology.devices
        return Executable(
            device.client.compile(
                lowered.compiler_ir(), executable_devices=_jax.DeviceList((device,)), compile_options=options_
            )
        )

    @functools.cached_property
    def _mesh(self) -> AbstractMesh:
        device = _DEVICES[self.name]
        described = AbstractDevice(device["name"], device["cores"], "gpu")
        return AbstractMesh((1,), ("device",), abstract_device=described)

    @functools.cached_property
    def _topology(self) -> Any:
        description = _DESCRIPTION.format(**_DEVICES[self.name])
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=description, topology="1x1x1"
        )


@dataclasses.dataclass(frozen=True)
class Executable:
    """Answers as `jax.stages.Compiled` does, but cannot run."""

    executable: Any

    def memory_analysis(self) -> Any:
        """Bytes of arguments, results and temporaries, on the GPU and on the host."""
        return self.executable.get_compiled_memory_stats()

    def as_text(self) -> str:
        """The compiled program."""
        (module,) = self.executable.hlo_modules()
        return module.to_string()
