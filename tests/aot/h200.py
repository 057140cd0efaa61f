"""Compiles for an H200; no GPU is needed."""

from oomb_jax.plan.absent import AbsentGPU

GPU = AbsentGPU("h200")
array, compiled = GPU.array, GPU.compile
