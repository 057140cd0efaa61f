"""Rotary position embedding, exact at any int32 position, with the frequency scalings of Hugging Face models."""

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from oomb_jax.shapes import Positions, accumulator

Kind = Literal["default", "linear", "dynamic", "yarn"]

SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "ctx"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
}
"""Fields of `Rope` that mean something to each kind, besides `theta` and `max_position_embeddings`."""

_SCALING = {name for names in SETTINGS.values() for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """How fast each pair of head dimensions turns with the position."""

    kind: Kind = "default"
    """`"default"`: no scaling. `"linear"`: every frequency is divided by `factor`. `"dynamic"`: the base grows with the
    sequence length (NTK-aware). `"yarn"`: slow frequencies are divided by `factor`, fast ones are kept, with a ramp
    between (https://arxiv.org/abs/2309.00071)."""

    theta: float = 10_000.0
    """Base of the geometric series of frequencies."""

    max_position_embeddings: int = 32_768
    """Length the model was trained for: only `"dynamic"` depends on it."""

    factor: float = 1.0
    """How much longer than trained the sequence may be: at least 1."""

    ctx: int | None = None
    """Tokens in the sequences to come. `"dynamic"` needs it, because its frequencies depend on the length."""

    original_max_position_embeddings: int | None = None
    """`"yarn"` needs it: the length before any scaling."""

    attention_factor: float = 1.0
    """`"yarn"`: cos and sin, so q and k, are multiplied by it."""

    beta_fast: float = 32.0
    """`"yarn"`: pairs with more turns than this in the original length are kept."""

    beta_slow: float = 1.0
    """`"yarn"`: pairs with fewer turns than this in the original length are divided by `factor`."""

    truncate: bool = True
    """`"yarn"`: the ends of the ramp are rounded outwards to whole pairs."""

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(f"rope type {self.kind!r} is not supported: one of {', '.join(get_args(Kind))}")
        for field in dataclasses.fields(self):
            foreign = field.name in _SCALING and field.name not in SETTINGS[self.kind]
            if foreign and getattr(self, field.name) != field.default:
                raise ValueError(f"rope type {self.kind!r} has no {field.name}: leave it out or correct the type")
        if self.theta <= 1:
            raise ValueError(f"rope theta={self.theta}: greater than 1")
        if self.factor < 1:
            raise ValueError(f"rope factor={self.factor}: at least 1")
        if self.kind == "dynamic" and self.ctx is None:
            raise ValueError("rope type 'dynamic' depends on the sequence length: give the number of tokens as ctx=")
        if self.kind == "yarn" and self.original_max_position_embeddings is None:
            raise ValueError("rope type 'yarn' needs original_max_position_embeddings, the length before scaling")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"rope beta_fast={self.beta_fast}: at least beta_slow={self.beta_slow}")


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each pair of head dimensions, float64 `[H / 2]`, on the host.

    The formulas are those of `transformers.modeling_rope_utils`, there in float32.
    """
    pairs = np.arange(head_dim // 2)
    theta = rope.theta
    if rope.kind == "dynamic":
        assert rope.ctx is not None  # checked by Rope
        length = max(rope.ctx, rope.max_position_embeddings) / rope.max_position_embeddings
        theta *= (rope.factor * length - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    unscaled = theta ** (-2.0 * pairs / head_dim)
    if rope.kind == "linear":
        return unscaled / rope.factor
    if rope.kind == "yarn":
        first, last = _ramp(rope, head_dim)
        slow = np.clip((pairs - first) / (last - first), 0, 1)
        return unscaled * (1 - slow) + unscaled / rope.factor * slow
    return unscaled


def _ramp(rope: Rope, head_dim: int) -> tuple[float, float]:
    """First and last pair of YaRN's ramp from kept to divided frequencies."""
    length = rope.original_max_position_embeddings
    assert length is not None  # checked by Rope

    def pair_with_turns(turns: float) -> float:
        return head_dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first, last = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    # The bound is the head's width, not the number of pairs: so does transformers, and models were trained with it.
    first, last = max(first, 0.0), min(last, head_dim - 1.0)
    return first, last if last != first else last + 0.001


def cos_sin(
    rope: Rope, head_dim: int, positions: Positions, dtype: DTypeLike
) -> tuple[Float[Array, "C R"], Float[Array, "C R"]]:
    """Cosine and sine of the angle of every position and pair (`R = head_dim / 2`), in `accumulator(dtype)`.

    A float32 product of position and frequency is wrong by up to 0.25 rad at position 4,194,303. Only the fraction of a
    turn matters, so a frequency is split into a multiple of `2**-32` turns, whose product with the position is exact in
    integers that wrap at a whole turn, and a rest below `2**-33` turns, for which float32 is enough. The error is below
    1e-6 rad for every int32 position.
    """
    radians = frequencies(rope, head_dim)
    if accumulator(dtype) == jnp.float64:
        angle = positions[:, None].astype(jnp.float64) * radians[None]
    else:
        turns = radians / (2 * math.pi)
        whole = np.rint(turns * 2.0**32).astype(np.int32)  # the fastest pair makes 1 / (2 pi) of a turn
        rest = (turns - whole * 2.0**-32).astype(np.float32)
        wrapped = positions[:, None] * whole[None]
        fraction = wrapped.astype(jnp.float32) * 2.0**-32 + positions[:, None].astype(jnp.float32) * rest[None]
        angle = fraction * (2 * math.pi)
    return jnp.cos(angle) * rope.attention_factor, jnp.sin(angle) * rope.attention_factor


def rotate(
    x: Float[Array, "C heads H"], cos: Float[Array, "C R"], sin: Float[Array, "C R"]
) -> Float[Array, "C heads H"]:
    """Turn the pairs `(x[i], x[i + H / 2])` of every head by the angles of their position; result in `x.dtype`."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
