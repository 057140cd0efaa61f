"""Compiles for an H200 from a description of the chip; no GPU is needed.

Uses private parts of JAX, as there is no public way yet.
"""

import jax
from jax._src import compiler
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

_MESH = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))


def array(*shape, dtype: DTypeLike = "bfloat16", memory: str | None = None):
    """An argument of `compiled`, in the device's memory unless another kind is named."""
    sharding = NamedSharding(_MESH, PartitionSpec(), memory_kind=memory)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled(function, *arguments, donate=(), **more):
    """The executable of a function of arrays; donate: which arguments."""
    with jax.sharding.use_abstract_mesh(_MESH):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments, **more)
        lowered = traced.lower(lowering_platforms=("cuda",))
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H200, topology="1x1x1")
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    devices = _jax.DeviceList(tuple(topology.devices))
    return topology.devices[0].client.compile(
        lowered.compiler_ir(), executable_devices=devices, compile_options=options
    )
