"""Options of XLA for the step; without them it is correct and slower."""

COMPILER_OPTIONS = {
    # Matrix products by cuBLAS alone read a layer's weights where they lie; products that may become Triton kernels
    # get a copy of them first, about 5 % of a step.
    "xla_gpu_enable_triton_gemm": False,
    # Command buffers run copies and kernels one after the other.
    "xla_gpu_enable_command_buffer": "",
    # XLA plans two calls of other streams at a time, and has the next wait; the movers of a layer are six.
    "xla_gpu_experimental_parallel_async_compute_limit": 8,
    # It counts pools in host memory as the GPU's, takes a step of millions of tokens for one that does not fit, and
    # computes parts of it again, by which it grows.
    "xla_disable_hlo_passes": "rematerialization",
}
"""For `jax.jit(oomb_jax.value_and_grad, compiler_options=oomb_jax.COMPILER_OPTIONS, ...)`; ignored by a CPU."""
