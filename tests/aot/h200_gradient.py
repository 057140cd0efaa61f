"""Compiles `value_and_grad` of Top-K attention with pools in the GPU's memory for an H200; no GPU is needed.

    python -m tests.aot.h200_gradient 16384

Prints its bytes and those of the plan. The training program compiles the passes apart; here XLA sees all of them.
"""

import functools
import sys

import jax
import jax.numpy as jnp

import oomb_jax
from oomb_jax.plan import Job, account
from tests.aot.h200 import array, compiled


def main(context: int) -> None:
    config = oomb_jax.Config(
        attention=oomb_jax.TopK(),
        implementation="mosaic",
        remat="full",
        grad_dtype="bfloat16",
        kv_grad_dtype="bfloat16",
    )
    model = oomb_jax.models.abstract("qwen2.5-7b")
    pools = jax.eval_shape(lambda model: oomb_jax.create_pools(model, context, config), model)
    model_there, pools = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), (model, pools))
    ids = array(context, dtype=jnp.int32)
    step = functools.partial(oomb_jax.value_and_grad, config=config)
    options = {"donate_argnums": 1, "compiler_options": oomb_jax.COMPILER_OPTIONS}
    memory = compiled(step, model_there, pools, ids, ids, **options).memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    print("compiled:", held + memory.temp_size_in_bytes)
    print("planned:", account(Job(model=model, config=config, ctx=context)).hbm["total"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
