"""Models as immutable pytrees: Qwen2 and Qwen2.5, by name, from random weights or from Hugging Face directories."""

from oomb_jax.models.hf import load, save
from oomb_jax.models.qwen2 import ModelConfig, Qwen2, Qwen2Layer
from oomb_jax.models.registry import abstract, config, create, names, parameter_count, parameter_names
from oomb_jax.models.rope import Rope

__all__ = [
    "ModelConfig",
    "Qwen2",
    "Qwen2Layer",
    "Rope",
    "abstract",
    "config",
    "create",
    "load",
    "names",
    "parameter_count",
    "parameter_names",
    "save",
]
