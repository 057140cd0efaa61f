"""Compiles a whole step with pools in host memory for an H200; no GPU is needed.

    python -m tests.aot.h200_offload "dict(hbm_layers=0)" 262144 1048576

Prints, for each context, its bytes in the GPU's memory (arguments, results, temporaries), those of the plan, those of
temporaries on the host, what else touches the pools there, copies of pools and of fetched pages, and what runs beside
every fetch.
"""

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp

import oomb_jax
from oomb_jax.plan import Job, account
from oomb_jax.plan.memory import staging_slots
from oomb_jax.pools import PAGE_ARRAYS
from oomb_jax.train.compiled import pool_copies
from tests.aot.h200 import array, compiled
from tests.aot.h200_page_move import touches_host


def main(contexts: list[int], **settings) -> None:
    """Compiles Top-K attention of qwen2.5-7b, with the least memory unless the settings say otherwise."""
    # The pools below are those of the default device, a CPU, where there is one memory; here they get the other.
    config = oomb_jax.Config(
        attention=oomb_jax.TopK(pages=64),
        implementation="mosaic",
        remat="full",
        grad_dtype="bfloat16",
        kv_grad_dtype="bfloat16",
    )
    config = dataclasses.replace(config, **settings)
    on = lambda tree, memory=None: jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype, memory=memory), tree)
    model = oomb_jax.models.abstract("qwen2.5-7b")
    step = functools.partial(oomb_jax.value_and_grad, config=config)
    for context in contexts:
        pools = jax.eval_shape(lambda model, context=context: oomb_jax.create_pools(model, context, config), model)
        assert pools.host is not None
        away = {name: on(getattr(pools.host, name), "pinned_host") for name in PAGE_ARRAYS}
        host = on(pools.host)._replace(**away)
        ids = array(context, dtype=jnp.int32)
        arguments = on(model), on(pools)._replace(host=host), ids, ids
        executable = compiled(step, *arguments, donate_argnums=1, compiler_options=oomb_jax.COMPILER_OPTIONS)
        memory, text = executable.memory_analysis(), executable.as_text()
        print("context:", context)
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        print("device:", held + memory.temp_size_in_bytes)
        job = Job(model=model, config=config, ctx=context)
        print("planned:", account(job).hbm["total"])
        print("host temporaries:", memory.host_temp_size_in_bytes)
        print("host not in place:", memory.host_argument_size_in_bytes - memory.host_alias_size_in_bytes)
        print("on the host:", [line.strip()[:200] for line in text.splitlines() if touches_host(line)])
        print("copied:", pool_copies(text, pools))
        fetched = ",".join(map(str, (staging_slots(job), *host.k.shape[2:])))
        print("fetched pages copied:", len(re.findall(rf"= \w+\[(?:1,)?{fetched}\]\S* copy\(", text)))
        for scope, counts in hidden(text).items():
            print(f"products beside a fetch, {scope}:", *counts)
        print("products beside an addition:", *hidden(text, additions=True)["backward"])
        for scope in "fill", "recompute", "backward":
            kernels = re.findall(rf'custom-call\(.*mosaic_gpu.*/{scope}/.*/matmul/mpmd_map"', text)
            print(f"products by the kernel, {scope}:", len(kernels))


def hidden(text: str, *, additions: bool = False) -> dict[str, list[int]]:
    """Of every fetch from the host in a loop over layers, or of every addition to a pool there, by pass: the products
    and attention kernels between its begin and its end, in the order in which the compiled program starts them."""
    counts, begun = {}, {}
    for line in text.splitlines():
        if line.endswith("{"):  # another computation
            begun = {}
        name, _, operation = line.strip().removeprefix("ROOT ").partition(" = ")
        if re.search(r"__cublas|mosaic_gpu|calls=%dynamic-slice-fusion", operation):
            begun = {start: count + 1 for start, count in begun.items()}
        if "call-start(" in operation and ":S(5)" in operation:
            begun[name] = 0
        done = re.search(r"call-done\((%\S+)\).*/(fill/while/body/.*|recompute/|backward/)while/body/", operation)
        if done and done[1] in begun:
            # Not what updates a pool, reads the chunk's own 32 pages, or measures the mass.
            staged = re.match(r"\w+\[(?!32,)\d+,\d+,\d+,\d+\]", operation) and "/cond/" not in operation
            if re.match(r"\w+\[\S+:S\(5\)", operation) if additions else staged:
                counts.setdefault(done[2].split("/")[0], []).append(begun[done[1]])
    return counts


if __name__ == "__main__":
    main([int(context) for context in sys.argv[2:]], **eval(sys.argv[1]))
