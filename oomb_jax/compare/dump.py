"""Our loss and gradients for given weights and ids, to lie beside those of another implementation."""

import contextlib
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from oomb_jax import models
from oomb_jax.chunked import value_and_grad
from oomb_jax.compiler import COMPILER_OPTIONS
from oomb_jax.config import Config
from oomb_jax.full_attention import full_attention_value_and_grad
from oomb_jax.pools import create_pools
from oomb_jax.sequence import chunk_count, chunk_length
from oomb_jax.shapes import IGNORE

LossScale = Literal["tokens", "labels"]


class Gradients(NamedTuple):
    """Loss and gradients of one sequence."""

    loss: float
    tensors: dict[str, np.ndarray]
    """float32 by Hugging Face name, in the file's layout."""

    selection: dict[str, np.ndarray]
    """The pages that Top-K chose: `select.layer{l}.chunk{c}` [1, C/S, K]; -1 = none. Empty without a choice."""


def gradients(
    model: models.Qwen2,
    tokens: Int[Array, " T"],
    labels: Int[Array, " T"],
    config: Config,
    *,
    selection: Int[Array, "L pages K"] | None = None,
    loss_scale: LossScale = "tokens",
) -> Gradients:
    """Loss and gradients of one sequence, in the names and layout of Hugging Face.

    Args:
      model: the weights.
      tokens, labels: as for `value_and_grad`.
      config: settings of the method.
      selection: pages that each query page attends to, as `read_selection` returns them. They are forced on full
        attention, whose memory grows with T squared.
      loss_scale: `"tokens"`: the sum of the token losses is divided by T, as the PyTorch implementation does.
        `"labels"`: by the number of labels that are not -100, as `value_and_grad` does.

    Host memory and a scratch directory hold all gradients once.
    """
    valid = int(jnp.sum(labels != IGNORE))
    factor = valid / len(tokens) if loss_scale == "tokens" else 1.0
    with jax.default_matmul_precision("highest"):  # a GPU would round float32 to TensorFloat-32
        if selection is not None:
            step = jax.jit(full_attention_value_and_grad, static_argnames="config")
            loss, grads, pools = step(model, None, tokens, labels, config, selection=selection)
        else:
            options = {"static_argnames": "config", "donate_argnames": "pools", "compiler_options": COMPILER_OPTIONS}
            step = jax.jit(value_and_grad, **options)
            loss, grads, pools = step(model, create_pools(model, len(tokens), config), tokens, labels, config)
    # Donated: the gradients of a large model are there once.
    scale = lambda grads: jax.tree.map(lambda x: x.astype(jnp.float32) * jnp.float32(factor), grads)
    grads = jax.jit(scale, donate_argnums=0)(grads)
    chosen = None if pools is None else pools.selection
    with tempfile.TemporaryDirectory() as scratch:
        models.save(grads, scratch, shard_bytes=2**62)
        return Gradients(float(loss) * factor, load_file(Path(scratch) / "model.safetensors"), _by_name(chosen))


def load_model(weights: Path, model_config: Path | None = None, *, dtype: DTypeLike = jnp.float32) -> models.Qwen2:
    """A Hugging Face directory, or one safetensors file that holds the weights among other tensors.

    The model of a file is described by `model_config` (a `config.json`), by `config` in the file's metadata, or by a
    `config.json` beside it, in this order. The weights are copied to a scratch directory.
    """
    if weights.is_dir():
        if model_config is not None:
            raise ValueError(f"model_config={model_config}: {weights} is a directory and has a config.json of its own")
        return models.load(weights, dtype=dtype)
    with _open(weights) as handle, tempfile.TemporaryDirectory() as scratch:
        beside = weights.with_name("config.json")
        described = (handle.metadata() or {}).get("config")
        if model_config is not None or (described is None and beside.is_file()):
            described = (model_config or beside).read_text(encoding="utf-8")
        if described is None:
            raise ValueError(f"{weights}: nothing describes its model; name a config.json with --model-config")
        (Path(scratch) / "config.json").write_text(described, encoding="utf-8")
        names = [name for name in handle.keys() if name.startswith(("model.", "lm_head."))]  # noqa: SIM118
        if not names:
            raise ValueError(f"{weights}: holds no weights; their names begin with model. or lm_head.")
        save_file({name: handle.get_tensor(name) for name in names}, Path(scratch) / "model.safetensors")
        return models.load(scratch, dtype=dtype)


def read_ids(path: Path, vocabulary: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Tokens and labels of one sequence.

    Args:
      path: a `.npy` file of token ids [T] or [1, T], or safetensors with `input_ids` and perhaps `labels` (already
        shifted, -100 = none). Without labels that of a token is the next one, and the last has none.
      vocabulary: V; ids are below it.
    """
    if path.suffix == ".npy":
        stored = {"input_ids": np.load(path)}
    elif path.suffix == ".safetensors":
        with _open(path) as handle:
            names = [name for name in ("input_ids", "labels") if name in handle.keys()]  # noqa: SIM118
            stored = {name: handle.get_tensor(name) for name in names}
    else:
        raise ValueError(f"ids={path}: a .npy file, or a .safetensors file that holds input_ids")
    if "input_ids" not in stored:
        raise ValueError(f"{path}: has no tensor named input_ids")
    for name, x in stored.items():
        if x.ndim == 2 and len(x) == 1:
            stored[name] = x = x[0]
        if x.ndim != 1 or not len(x) or x.dtype.kind not in "iu" or x.shape != stored["input_ids"].shape:
            raise ValueError(f"{path}: {name} is {x.dtype} of shape {list(x.shape)}, not whole numbers [T]")
    tokens = stored["input_ids"].astype(np.int64)
    labels = stored.get("labels", np.append(tokens[1:], IGNORE)).astype(np.int64)
    for name, x in ("input_ids", tokens), ("labels", labels[labels != IGNORE]):
        if len(x) and not 0 <= x.min() <= x.max() < vocabulary:
            raise ValueError(f"{path}: {name} from {x.min()} to {x.max()}; the model has 0 to {vocabulary - 1}")
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(labels, jnp.int32)


def read_selection(path: Path, layers: int, T: int, config: Config) -> Int[np.ndarray, "L pages K"]:
    """The pages that each layer and query page attend to, from `select.layer{l}.chunk{c}` [1, C/S, K] of a file.

    A chunk of which a file has no table attends to all pages before it; only one with at most K of them may lack it.
    """
    rows, chunks = chunk_length(T, config) // config.page, chunk_count(T, config)
    found = {}
    with _open(path) as handle:
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            if match := re.fullmatch(r"select\.layer(\d+)\.chunk(\d+)", name):
                table = handle.get_tensor(name)
                found[int(match[1]), int(match[2])] = table.reshape(-1, table.shape[-1])
    if not found:
        raise ValueError(f"{path}: has no tensors named select.layer0.chunk1 and so on")
    K = max(table.shape[1] for table in found.values())
    chosen = np.full((layers, chunks, rows, K), -1, np.int32)
    for l in range(layers):
        for c in range(chunks):
            name, earlier = f"select.layer{l}.chunk{c}", c * rows
            table = found.pop((l, c), None)
            if table is None:
                if earlier > K:
                    raise ValueError(f"{path}: {name} is missing; {earlier} pages before it are more than {K}")
                chosen[l, c, :, :earlier] = np.arange(earlier)
                continue
            expected = min(rows, math.ceil((T - c * chunk_length(T, config)) / config.page))
            if len(table) not in (expected, rows):
                raise ValueError(f"{path}: {name} has {len(table)} rows, not {expected}: chunk or page is another one")
            if not -1 <= table.min() <= table.max() < earlier:
                raise ValueError(f"{path}: {name} names pages {table.min()} to {table.max()} of {earlier} before it")
            chosen[l, c, : len(table), : table.shape[1]] = table
    if found:
        l, c = min(found)
        raise ValueError(f"{path}: select.layer{l}.chunk{c} is beyond {layers} layers and {chunks} chunks")
    return chosen.reshape(layers, chunks * rows, K)


def _by_name(selection: Int[Array, "n L R K"] | None) -> dict[str, np.ndarray]:
    if selection is None:
        return {}
    return {
        f"select.layer{l}.chunk{c}": table[None]
        for c, by_layer in enumerate(np.asarray(selection))
        for l, table in enumerate(by_layer)
        if c > 0
    }


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        handle = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from None
    with handle:
        yield handle
