"""Models by name, and models from random weights."""

import difflib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Key, PyTree

from oomb_jax.models.qwen2 import ModelConfig, Qwen2
from oomb_jax.models.rope import Rope


def _qwen25(
    *, layers: int, width: int, ff: int, heads: int, kv_heads: int, ctx: int, eps: float = 1e-6, tied: bool = False
) -> ModelConfig:
    """A base model of the Qwen2.5 family, from its published `config.json`."""
    return ModelConfig(
        vocab_size=151_936 if tied else 152_064,
        hidden_size=width,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        rope=Rope(theta=1e6, max_position_embeddings=ctx),
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
        bos_token_id=151_643,
        eos_token_id=151_643,
    )


_32K, _128K = 32_768, 131_072

_CONFIGS = {
    # Reads bytes: ids 0 to 255 are bytes, 256 ends a document, 257 to 259 are free. Small enough to learn from 16,384
    # tokens at a time on two CPU cores. At this width an untied head and wide random weights learn fastest: after 120
    # steps of 8,192 bytes the loss is 2.37, tied with 0.02 it is 2.73.
    "tiny": ModelConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.05,
        eos_token_id=256,
    ),
    "qwen2.5-0.5b": _qwen25(layers=24, width=896, ff=4_864, heads=14, kv_heads=2, ctx=_32K, tied=True),
    "qwen2.5-1.5b": _qwen25(layers=28, width=1_536, ff=8_960, heads=12, kv_heads=2, ctx=_128K, tied=True),
    "qwen2.5-3b": _qwen25(layers=36, width=2_048, ff=11_008, heads=16, kv_heads=2, ctx=_32K, tied=True),
    "qwen2.5-7b": _qwen25(layers=28, width=3_584, ff=18_944, heads=28, kv_heads=4, ctx=_128K),
    "qwen2.5-14b": _qwen25(layers=48, width=5_120, ff=13_824, heads=40, kv_heads=8, ctx=_128K, eps=1e-5),
    "qwen2.5-32b": _qwen25(layers=64, width=5_120, ff=27_648, heads=40, kv_heads=8, ctx=_128K, eps=1e-5),
    "qwen2.5-72b": _qwen25(layers=80, width=8_192, ff=29_568, heads=64, kv_heads=8, ctx=_128K, eps=1e-5),
}


def names() -> tuple[str, ...]:
    """Names that `config` and `create` know."""
    return tuple(_CONFIGS)


def config(name: str) -> ModelConfig:
    """The configuration of a named model. An unknown name is a `ValueError` that lists the known ones."""
    if name not in _CONFIGS:
        if "/" in name:
            raise ValueError(f"model {name!r}: no such directory; one of {', '.join(_CONFIGS)}, or a directory on disk")
        close = difflib.get_close_matches(name.lower(), _CONFIGS, n=1, cutoff=0.5)
        hint = f", did you mean {close[0]!r}?" if close else ":"
        raise ValueError(f"unknown model {name!r}{hint} One of {', '.join(_CONFIGS)}, or a directory for models.load")
    return _CONFIGS[name]


def create(model: str | ModelConfig, *, key: Key[Array, ""], dtype: DTypeLike = jnp.bfloat16) -> Qwen2:
    """A model with random weights on the default device, made in `dtype` without a wider copy of the whole."""
    return _random(_settings(model), key, parameter_dtype(dtype))


def abstract(model: str | ModelConfig, *, dtype: DTypeLike = jnp.bfloat16) -> Qwen2:
    """The shapes and dtypes of a model (`jax.ShapeDtypeStruct` leaves), without any memory."""
    settings, dtype = _settings(model), parameter_dtype(dtype)
    return jax.eval_shape(lambda: _random(settings, jax.random.key(0), dtype))


def parameter_names(model: PyTree) -> PyTree[str]:
    """A pytree like `model` whose leaves are dotted names: `layers.q_proj.weight`, `embed_tokens.weight`, ..."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _dotted(path), model)


def parameter_count(model: PyTree) -> int:
    """Numbers in the model, the tied embedding once."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model))


def parameter_dtype(dtype: DTypeLike) -> np.dtype:
    """Check a dtype for parameters: floating-point, 16 bits or more, and one that JAX will not narrow."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"dtype={dtype}: parameters are bfloat16, float16, float32 or float64")
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype=float64: JAX makes float64 arrays only after jax.config.update('jax_enable_x64', True)")
    return dtype


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _random(config: ModelConfig, key: Key[Array, ""], dtype: np.dtype) -> Qwen2:
    return Qwen2(config, key=key, dtype=dtype)


def _settings(model: str | ModelConfig) -> ModelConfig:
    return config(model) if isinstance(model, str) else model


def _dotted(path: tuple) -> str:
    # The last step is the `value` of an `nnx.Param`.
    return ".".join(step.name for step in path[:-1])
