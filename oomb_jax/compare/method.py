"""The method files of the PyTorch implementation, as our settings."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from oomb_jax.config import Config, Dense
from oomb_jax.selection import TopK


class _Keys(NamedTuple):
    """The keys of a method beside `method` itself."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()


_CHUNKED = frozenset(("grad_ckpt", "block_size", "page_size", "cpu_offload"))
_BACKEND = frozenset(
    (
        "attention_backend",
        "attention_merge_backend",
        "attention_reduce_dtype",
        "attention_query_block_size",
        "attention_kv_block_size",
        "attention_fallback_to_local",
    )
)
_METHODS = {
    "baseline-tp": _Keys(frozenset(("grad_ckpt",))),
    "blockwise-tp": _Keys(_CHUNKED, _BACKEND),
    "blockwise-tp-sparse": _Keys(_CHUNKED | {"page_budget"}, frozenset(("visualize",))),
}


def method_config(source: str | os.PathLike[str] | dict[str, Any]) -> tuple[Config, tuple[str, ...]]:
    """What a method file asks for.

    Args:
      source: a JSON file such as its `test_efficiency/config_blockwise_sparse.json`, or what such a file holds.

    Returns:
      The settings, and a line for each key that has no setting of just the same meaning here.

    Raises:
      ValueError: an unknown method or key, a missing key, or a value that does not fit.
    """
    if isinstance(source, dict):
        return _config(source)
    path = Path(source)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"holds {type(raw).__name__}, not an object")
        return _config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config(raw: dict[str, Any]) -> tuple[Config, tuple[str, ...]]:
    method = raw.get("method")
    if method not in _METHODS:
        raise ValueError(f"method={method!r}: one of {', '.join(_METHODS)}")
    keys = _METHODS[method]
    given = raw.keys() - {"method"}
    if unknown := sorted(given - keys.required - keys.optional):
        known = ", ".join(sorted(keys.required | keys.optional))
        raise ValueError(f"{', '.join(unknown)}: unknown to method {method!r}, which has {known}")
    if missing := sorted(keys.required - given):
        raise ValueError(f"{', '.join(missing)} missing: method {method!r} needs {', '.join(sorted(keys.required))}")
    if not isinstance(raw["grad_ckpt"], bool):
        raise ValueError(f"grad_ckpt={raw['grad_ckpt']!r}: true or false")
    settings: dict[str, Any] = {"remat": "full" if raw["grad_ckpt"] else "none"}
    if method == "baseline-tp":
        note = "method='baseline-tp': the whole sequence at once there, in chunks here, with the same gradient"
        return Config(**settings), (note,)
    settings |= {"chunk": _count(raw, "block_size"), "page": _count(raw, "page_size")}
    sparse = method == "blockwise-tp-sparse"
    settings["attention"] = TopK(pages=_count(raw, "page_budget")) if sparse else Dense()
    notes = []
    if raw["cpu_offload"] is not None:
        settings["hbm_layers"] = _count(raw, "cpu_offload")
        notes.append(
            f"cpu_offload={raw['cpu_offload']}: there so many layers are in GPU memory at a time, the one at work and "
            f"those after it; here the first {raw['cpu_offload']} are, all the time (hbm_layers)"
        )
    if raw.get("visualize") is not None:
        layer = _count(raw, "visualize", least=0)
        notes.append(
            f"visualize={layer}: there a picture of the pages that layer {layer} chose; here python -m oomb_jax.show "
            f"selection draws it, and the pages are an array, pools.selection[:, {layer}] after a step"
        )
    if kernels := sorted(given & _BACKEND):
        notes.append(f"{', '.join(kernels)}: there they choose among exact kernels, whose result is the same")
    return Config(**settings), tuple(notes)


def _count(raw: dict[str, Any], key: str, *, least: int = 1) -> int:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key}={value!r}: a whole number from {least}")
    return value
