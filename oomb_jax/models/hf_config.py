"""The `config.json` of a Hugging Face directory, to and from `ModelConfig`. What it asks for is done or refused."""

import json
import math
from pathlib import Path
from typing import Any, get_args

from jax.typing import DTypeLike

from oomb_jax.models.qwen2 import ModelConfig
from oomb_jax.models.rope import SETTINGS, Kind, Rope

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_ROPE_SETTINGS = {kind: set(names) - {"ctx"} for kind, names in SETTINGS.items()}


def read(directory: Path, *, ctx: int | None = None) -> ModelConfig:
    """Read `config.json`. `ctx` is the sequence length, which `"dynamic"` rope scaling needs.

    Anything in it that this model does not do (another architecture, sliding windows, dropout, unknown rope settings)
    is a `ValueError`.
    """
    file = directory / "config.json"
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory; a model is a directory with config.json and weights")
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not found; a model directory holds config.json and *.safetensors")
    raw = read_json(file)
    try:
        return _model_config(raw, ctx)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; anything else there is a `ValueError` that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds {type(content).__name__}, not an object")
    return content


def write(config: ModelConfig, dtype: DTypeLike) -> str:
    """The text of a `config.json` for parameters of `dtype`, in the style that `transformers` 4 and 5 read."""
    rope = config.rope
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": rope.max_position_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(rope),
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": str(dtype),
    }
    return json.dumps(raw, indent=2) + "\n"


def _model_config(raw: dict[str, Any], ctx: int | None) -> ModelConfig:
    _refuse_unsupported(raw)
    missing = [name for name in _REQUIRED if raw.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    heads = raw["num_attention_heads"]
    if raw.get("head_dim") is None and raw["hidden_size"] % heads:
        raise ValueError(
            f"hidden_size={raw['hidden_size']} is no multiple of num_attention_heads={heads}: give head_dim"
        )
    optional = {"rms_norm_eps", "tie_word_embeddings", "initializer_range", "bos_token_id"}
    eos = raw.get("eos_token_id")
    return ModelConfig(
        **{name: raw[name] for name in _REQUIRED},
        **{name: raw[name] for name in optional if raw.get(name) is not None},
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        rope=_rope(raw, ctx),
    )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("model_type") != "qwen2":
        raise ValueError(f"model_type={raw.get('model_type')!r} is not supported, only 'qwen2' (Qwen2 and Qwen2.5)")
    architectures = raw.get("architectures") or ["Qwen2ForCausalLM"]
    if architectures != ["Qwen2ForCausalLM"]:
        raise ValueError(f"architectures={architectures} is not supported, only Qwen2ForCausalLM")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("attention_dropout"):
        raise ValueError(f"attention_dropout={raw['attention_dropout']} is not supported: set it to 0")
    if raw.get("quantization_config"):
        raise ValueError("quantization_config: quantized weights are not supported; use the unquantized model")
    windowed = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    # As in transformers: the layers from max_window_layers on have the window.
    first_windowed = raw.get("max_window_layers", 28)
    if windowed and first_windowed < raw.get("num_hidden_layers", 0):
        raise ValueError(
            f"use_sliding_window=true with max_window_layers={first_windowed}: sliding windows are not supported; set "
            "use_sliding_window to false for full attention in every layer"
        )
    other_attention = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other_attention:
        raise ValueError(f"layer_types with {', '.join(other_attention)} are not supported, only full_attention")


def _rope(raw: dict[str, Any], ctx: int | None) -> Rope:
    """Both styles of configuration: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    settings = {name: value for name, value in given.items() if value is not None}
    kind = settings.pop("rope_type", None) or settings.get("type") or "default"
    settings.pop("type", None)
    theta = settings.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    if settings.pop("partial_rotary_factor", 1.0) != 1.0 or (raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: Qwen2 turns whole heads")
    if kind not in _ROPE_SETTINGS:
        raise ValueError(f"rope type {kind!r} is not supported: one of {', '.join(get_args(Kind))}")
    unknown = sorted(set(settings) - _ROPE_SETTINGS[kind] - ({"mscale", "mscale_all_dim"} if kind == "yarn" else set()))
    if unknown:
        raise ValueError(f"rope type {kind!r} has no setting {', '.join(unknown)}: remove it or correct the type")
    trained = raw.get("max_position_embeddings") or 32_768
    if kind == "yarn":
        settings = _yarn(settings, trained)
    elif kind != "default" and "factor" not in settings:
        raise ValueError(f"rope type {kind!r} needs a factor")
    return Rope(
        kind=kind,
        theta=float(theta),
        max_position_embeddings=trained,
        ctx=ctx if kind == "dynamic" else None,
        **settings,
    )


def _yarn(settings: dict[str, Any], trained: int) -> dict[str, Any]:
    """YaRN's defaults, and its attention factor from `mscale` and `mscale_all_dim`."""
    original = settings.get("original_max_position_embeddings", trained)
    factor = settings.get("factor", trained / original)
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")

    def attention_factor(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    inferred = attention_factor(mscale) / attention_factor(all_dim) if mscale and all_dim else attention_factor(1.0)
    return {
        "factor": float(factor),
        "original_max_position_embeddings": original,
        "attention_factor": float(settings.get("attention_factor", inferred)),
        # A zero means the default there too.
        "beta_fast": float(settings.get("beta_fast") or 32),
        "beta_slow": float(settings.get("beta_slow") or 1),
        "truncate": settings.get("truncate", True),
    }


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    return {"rope_type": rope.kind} | {name: getattr(rope, name) for name in sorted(_ROPE_SETTINGS[rope.kind])}
