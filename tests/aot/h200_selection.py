"""Compiles the selection of a chunk for an H200 from a description of the chip; no GPU is needed.

    python -m tests.aot.h200_selection "dict(P=32768, implementation='mosaic')"

Prints the bytes of temporaries. Uses private parts of JAX, as there is no public way yet.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jax._src import compiler
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

from oomb_jax.selection import Scope, TopK, select, stage
from tests.aot.h200 import H200


def main(*, C=4096, M=4, G=7, H=128, S=128, P=32768, K=64, scope: Scope = "all_heads", segmented=False, implementation):
    """Compiles scores, choice and slots of one chunk and layer."""
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H200, topology="1x1x1")
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))
    sharding = NamedSharding(mesh, PartitionSpec())
    array = lambda *shape, dtype="int32": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    choose = functools.partial(select, TopK(pages=K, scope=scope), page=S, implementation=implementation)
    segments = {"q_segments": array(C), "pool_segments": array(P, S)} if segmented else {}

    def choose_and_stage(q, representatives, first_page, **segments):
        table = choose(q, representatives, first_page, **segments)
        return table, stage(table, P)

    arguments = array(C, M * G, H, dtype="bfloat16"), array(P, M, H, dtype="bfloat16"), array()
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(choose_and_stage).trace(*arguments, **segments).lower(lowering_platforms=("cuda",))
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    devices = _jax.DeviceList(tuple(topology.devices))
    client = topology.devices[0].client
    executable = client.compile(lowered.compiler_ir(), executable_devices=devices, compile_options=options)
    print("temporaries:", executable.get_compiled_memory_stats().temp_size_in_bytes)


if __name__ == "__main__":
    main(**eval(sys.argv[1]))
