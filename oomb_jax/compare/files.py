"""Gradient files: tensors under Hugging Face names, read row by row so that a model of any size can be compared.

Read are safetensors (a file, or a directory of them), and what `torch.save` writes: `{"name": [...], "grad": [...]}`,
as the accuracy test of the PyTorch implementation does, or a dictionary of tensors by name.
"""

import contextlib
import importlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

TORCH = (".pth", ".pt")
"""Endings of files that torch reads and writes."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_WRAPPED = "model."  # what the PyTorch implementation's wrapper puts before every name
_ORDER = (
    *(f"self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias")),
    *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


class StoredTensor(NamedTuple):
    """A tensor that is still in its file."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]
    """`rows(start, stop)` reads these indices of the first axis, in float64."""


class GradientFile(NamedTuple):
    """What a file holds."""

    tensors: dict[str, StoredTensor]
    others: int
    """How many tensors were left out: those under another prefix, of whole numbers, or without an axis."""

    loss: float | None
    """The loss that was stored with the gradients."""


@contextlib.contextmanager
def open_gradients(path: Path, prefix: str | None = None) -> Iterator[GradientFile]:
    """The gradients of a file, which stays open.

    Args:
      path: a file, or a directory of safetensors.
      prefix: what stands before the Hugging Face name; tensors without it are left out. None: `grad.` or `model.`
        (before `model.layers...`) where the file has such names, otherwise nothing.

    Raises:
      ValueError: the file cannot be read, or has no tensor under the prefix.
      ImportError: the file needs torch, which is not installed.
    """
    with contextlib.ExitStack() as stack:
        stored, loss, count = _read_torch(path) if path.suffix in TORCH else _read_safetensors(path, stack)
        prefix = _prefix(stored) if prefix is None else prefix
        tensors = {name.removeprefix(prefix): x for name, x in stored.items() if name.startswith(prefix)}
        if not tensors:
            begin = ", ".join(sorted(stored)[:3]) or "none"
            raise ValueError(f"{path}: no floating-point tensor under the prefix {prefix!r}; its names begin: {begin}")
        yield GradientFile(tensors, count - len(tensors), loss)


def write_gradients(
    path: Path,
    gradients: Mapping[str, np.ndarray],
    loss: float,
    *,
    others: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write gradients by Hugging Face name, for `open_gradients`.

    A `.pth` or `.pt` file has the names and the order of the PyTorch implementation, whose own scripts can read it, and
    the loss beside them. Only safetensors hold other tensors and metadata.
    """
    check_out(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in TORCH:
        torch = _torch(path)
        names = sorted(gradients, key=_place)
        values = [torch.from_numpy(gradients[name]) for name in names]
        torch.save({"name": [_WRAPPED + name for name in names], "grad": values, "loss": loss}, path)
    else:
        about = {"format": "pt", "loss": repr(loss)}
        save_file({**gradients, **(others or {})}, path, about | dict(metadata or {}))


def check_out(path: Path) -> None:
    """Raises what `write_gradients` would about the file's ending, before the gradients are computed."""
    if path.suffix in TORCH:
        _torch(path)
    elif path.suffix != ".safetensors":
        raise ValueError(f"out={path}: gradients go to a .safetensors, .pth or .pt file")


def _prefix(names: Iterable[str]) -> str:
    begins = lambda start: any(name.startswith(start) for name in names)
    return "grad." if begins("grad.") else _WRAPPED if begins(_WRAPPED + "model.") else ""


def _place(name: str) -> tuple[int, int]:
    """Where a parameter stands in the PyTorch model."""
    outer = {"model.embed_tokens.weight": -1, "model.norm.weight": 2**30, "lm_head.weight": 2**31}
    if name in outer:
        return outer[name], 0
    _, _, layer, rest = name.split(".", 3)
    return int(layer), _ORDER.index(rest)


def _read_safetensors(path: Path, stack: contextlib.ExitStack) -> tuple[dict[str, StoredTensor], float | None, int]:
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path}: a directory without *.safetensors")
    stored, loss, count = {}, None, 0
    for file in paths:
        try:
            handle = stack.enter_context(safe_open(file, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{file}: not a whole safetensors file: {error}") from None
        loss = (handle.metadata() or {}).get("loss", loss)
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            view = handle.get_slice(name)
            count += 1
            if view.get_dtype() in _FLOATS and view.get_shape():
                read = lambda start, stop, view=view: view[start:stop].astype(np.float64)
                stored[name] = StoredTensor(tuple(view.get_shape()), read)
    return stored, None if loss is None else float(loss), count


def _read_torch(path: Path) -> tuple[dict[str, StoredTensor], float | None, int]:
    torch = _torch(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: not a file of tensors that torch can map into memory: {reason}") from None
    loss = None
    if isinstance(content, dict) and {"name", "grad"} <= content.keys():
        loss = content.get("loss")
        names, values = content["name"], content["grad"]
        if len(names) != len(values):
            raise ValueError(f"{path}: {len(names)} names and {len(values)} gradients; each needs its name")
        content = dict(zip(names, values, strict=True))
    if not isinstance(content, dict):
        raise ValueError(
            f'{path}: holds {type(content).__name__}; tensors by name, or {{"name": [...], "grad": [...]}}, are read'
        )
    stored = {
        name: StoredTensor(tuple(x.shape), lambda start, stop, x=x: x[start:stop].to(torch.float64).numpy())
        for name, x in content.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim
    }
    return stored, None if loss is None else float(loss), len(content)


def _torch(path: Path) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise ImportError(f"{path}: {path.suffix} files need PyTorch; pip install torch, or use .safetensors") from None
