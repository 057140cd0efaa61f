"""Hugging Face directories: weights in, weights out, tensor by tensor.

A directory holds `config.json` and either `model.safetensors` or shards with `model.safetensors.index.json`. In the
files a layer has tensors of its own and a linear weight is `[out, in]`; here layers are stacked and it is `[in, out]`.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from oomb_jax.models import hf_config
from oomb_jax.models.qwen2 import Qwen2
from oomb_jax.models.registry import abstract, parameter_dtype, parameter_names

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_BLOCKS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn."),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp."),
}


class _Tensor(NamedTuple):
    """What a tensor of a file is in the model."""

    parameter: str
    """Dotted name of the parameter."""

    layer: int | None
    """Index on the parameter's leading axis; None outside the layers."""

    transposed: bool
    """Whether the file holds the transpose."""

    shape: tuple[int, ...]
    """Shape in the file."""


def load(directory: str | os.PathLike[str], *, dtype: DTypeLike | None = None, ctx: int | None = None) -> Qwen2:
    """Read a model onto the default device. Host memory holds one stacked parameter at a time.

    `dtype` None keeps that of the files. `ctx`, the length of the sequences to come, is for `"dynamic"` rope scaling
    alone.

    Raises `FileNotFoundError` for missing files, and one `ValueError` that names every missing, surplus or misshapen
    tensor.
    """
    directory = Path(directory)
    config = hf_config.read(directory, ctx=ctx)
    model = abstract(config)
    layout = _layout(model)
    with contextlib.ExitStack() as stack:
        files = _open(directory, stack)
        _check(directory, layout, files, tied=config.tie_word_embeddings)
        wanted = parameter_dtype(_stored_dtype(directory, layout, files) if dtype is None else dtype)

        def read(leaf: jax.ShapeDtypeStruct, parameter: str) -> jax.Array:
            buffer = np.empty(leaf.shape, wanted)
            for name, tensor in layout.items():
                if tensor.parameter == parameter:
                    value = files[name].get_tensor(name)
                    target = buffer if tensor.layer is None else buffer[tensor.layer]
                    target[...] = value.T if tensor.transposed else value
            # Wait: the next parameter's buffer would be there at the same time otherwise.
            return jax.block_until_ready(jax.device_put(buffer))

        return jax.tree.map(read, model, parameter_names(model))


def save(model: Qwen2, directory: str | os.PathLike[str], *, shard_bytes: int = 5 * 10**9) -> None:
    """Write `config.json` and safetensors that `transformers` loads; more than `shard_bytes` become several files.

    A pytree like a model, such as its gradients, is written under the same names. Everything is written under temporary
    names first. While the files are then renamed, the directory has neither `model.safetensors` nor the index, so an
    interrupted save is never taken for a whole model. Other files in the directory stay. Host memory holds one file.

    Raises `OSError` where something cannot be written.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(zip(jax.tree.leaves(parameter_names(model)), jax.tree.leaves(model), strict=True))
    layout = _layout(model)
    sizes = {name: math.prod(t.shape) * parameters[t.parameter].dtype.itemsize for name, t in layout.items()}
    shards = _shards(sizes, shard_bytes)

    # In the order of the final renames: what makes the directory a model comes last.
    files = ["config.json", *shards, *([_INDEX] if len(shards) > 1 else [])]
    temporary = {file: directory / f"{file}.tmp" for file in files}
    try:
        text = hf_config.write(model.config, parameters["embed_tokens.weight"].dtype)
        temporary["config.json"].write_text(text, encoding="utf-8")
        for file, names in shards.items():
            # transformers refuses files without this metadata.
            try:
                save_file({name: _value(parameters, layout[name]) for name in names}, temporary[file], {"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{directory / file}: {error}") from None
        if _INDEX in temporary:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            temporary[_INDEX].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for path in temporary.values():
            path.chmod(temporary["config.json"].stat().st_mode)  # safetensors are for their owner alone otherwise
            with path.open("rb") as handle:
                os.fsync(handle.fileno())  # otherwise the rename may reach the disk before the contents
        for path in (directory / _SINGLE, directory / _INDEX, *directory.glob("model-*-of-*.safetensors")):
            path.unlink(missing_ok=True)
        for file, path in temporary.items():
            path.replace(directory / file)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _layout(model: Qwen2) -> dict[str, _Tensor]:
    """Every tensor of the files by its name there, in the order of the forward pass."""
    layout = {}
    for parameter, leaf in zip(jax.tree.leaves(parameter_names(model)), jax.tree.leaves(model), strict=True):
        *_, module, kind = parameter.split(".")
        transposed = kind == "weight" and (module.endswith("_proj") or module == "lm_head")
        if parameter.startswith("layers."):
            shape = leaf.shape[:0:-1] if transposed else leaf.shape[1:]
            for layer in range(leaf.shape[0]):
                name = f"model.layers.{layer}.{_BLOCKS.get(module, '')}{module}.{kind}"
                layout[name] = _Tensor(parameter, layer, transposed, shape)
        else:
            name = parameter if module == "lm_head" else f"model.{parameter}"
            layout[name] = _Tensor(parameter, None, transposed, leaf.shape[::-1] if transposed else leaf.shape)

    def depth(name: str) -> int:
        layer = layout[name].layer
        return layer if layer is not None else -1 if "embed_tokens" in name else model.config.num_hidden_layers

    return {name: layout[name] for name in sorted(layout, key=depth)}


def _open(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor."""
    if (directory / _SINGLE).is_file():
        shards = [_SINGLE]
    elif (directory / _INDEX).is_file():
        weight_map = hf_config.read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{directory / _INDEX}: has no weight_map")
        shards = sorted(set(weight_map.values()))
    else:
        raise FileNotFoundError(f"{directory}: holds neither {_SINGLE} nor {_INDEX}; other weight formats are not read")
    missing = [file for file in shards if not (directory / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory}: {_INDEX} names files that are not there: {', '.join(missing)}")
    files = {}
    for file in shards:
        try:
            handle = stack.enter_context(safe_open(directory / file, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{directory / file}: not a whole safetensors file: {error}") from None
        files.update(dict.fromkeys(handle.keys(), handle))
    return files


def _check(directory: Path, layout: Mapping[str, _Tensor], files: Mapping[str, Any], *, tied: bool) -> None:
    faults = []
    if missing := [name for name in layout if name not in files]:
        faults.append(f"missing {', '.join(missing)}")
    # Some tied models come with a copy of the embedding as their head.
    copied_head = tied and "lm_head.weight" in files
    if surplus := [name for name in files if name not in layout and not (copied_head and name == "lm_head.weight")]:
        faults.append(f"surplus {', '.join(sorted(surplus))}")
    for name, tensor in layout.items():
        if name in files:
            stored = files[name].get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if shape != tensor.shape:
                faults.append(f"{name} has shape {list(shape)}, not {list(tensor.shape)}")
            if dtype not in _DTYPES:
                faults.append(f"{name} is {dtype}, not one of {', '.join(_DTYPES)}")
    if faults:
        raise ValueError(f"{directory}: the weights are not those that config.json describes: {'; '.join(faults)}")
    if copied_head:
        embedding, head = (files[name].get_tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        if not np.array_equal(embedding, head):
            raise ValueError(
                f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false in config.json to keep both"
            )


def _stored_dtype(directory: Path, layout: Mapping[str, _Tensor], files: Mapping[str, Any]) -> np.dtype:
    found = sorted({files[name].get_slice(name).get_dtype() for name in layout})
    if len(found) > 1:
        raise ValueError(f"{directory}: holds {' and '.join(found)} tensors; choose one with dtype=")
    return _DTYPES[found[0]]


def _shards(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Names of the tensors in each file: as many as fit in `limit` bytes, and at least one."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


def _value(parameters: Mapping[str, jax.Array], tensor: _Tensor) -> np.ndarray:
    leaf = parameters[tensor.parameter]
    value = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer])
    # safetensors writes the memory of an array whatever its strides, so a transpose must be made real.
    return np.ascontiguousarray(value.T if tensor.transposed else value)
