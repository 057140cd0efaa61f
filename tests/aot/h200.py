"""Compiles `paged_attention` and its gradient for an H200 from a description of the chip; no GPU is needed.

    python -m tests.aot.h200 "dict(R=32, K=64)"

Prints the copies of pools in the compiled program. Uses private parts of JAX, as there is no public way yet.
"""

import functools
import re
import sys

import jax
import jax.numpy as jnp
from jax._src import compiler
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from oomb_jax.pallas_kernels.paged_attention import paged_attention, paged_attention_vjp

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


def main(
    *,
    C=4096,
    M=4,
    G=7,
    H=128,
    S=128,
    R=1,
    K=256,
    P=4096,
    L=2,
    segmented=False,
    gradient_dtype="float32",
    stochastic=False,
):
    """Compiles one case, the gradient pools donated."""
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H200, topology="1x1x1")
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))
    sharding = NamedSharding(mesh, PartitionSpec())
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    q, own, pool = array(C, M * G, H), array(C, M, H), array(L, P, M, S, H)
    gradients = array(L, P, M, S, H, dtype=gradient_dtype)
    indices = array(dtype="int32"), array(R, K, dtype="int32")
    segments = {}
    if segmented:
        segments = {"q_segments": array(C, dtype="int32"), "pool_segments": array(P, S, dtype="int32")}
    lse = array(M * G, C, dtype="float32")
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=sharding)

    def compiled(function, *arguments, donate=(), **more):
        function = jax.jit(functools.partial(function, implementation="mosaic"), donate_argnums=donate)
        with jax.sharding.use_abstract_mesh(mesh):
            lowered = function.trace(*arguments, **segments, **more).lower(lowering_platforms=("cuda",))
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        devices = _jax.DeviceList(tuple(topology.devices))
        client = topology.devices[0].client
        executable = client.compile(lowered.compiler_ir(), executable_devices=devices, compile_options=options)
        return executable.hlo_modules()[0].to_string()

    programs = (
        compiled(paged_attention, q, own, own, pool, pool, *indices),
        compiled(
            paged_attention_vjp,
            *(q, own, own, pool, pool, gradients, gradients, *indices, q, lse, q),
            donate=(5, 6),
            **({"rounding_key": key} if stochastic else {}),
        ),
    )
    # A pool has L * P * M * S * H elements, a layer of it P * M * S * H; nothing else is as large.
    shapes = [
        f"{L},{P},{M},{S},{H}",
        f"{L * P * M},{S},{H}",
        f"{P},{M},{S},{H}",
        f"1,{P},{M},{S},{H}",
        f"{P * M},{S},{H}",
    ]
    pattern = re.compile(rf"\[({'|'.join(shapes)})\]\S* (copy|slice|dynamic-slice|fusion|dynamic-update-slice)\(")
    print(
        "copies:", [line.strip()[:200] for program in programs for line in program.splitlines() if pattern.search(line)]
    )


if __name__ == "__main__":
    main(**eval(sys.argv[1]))
