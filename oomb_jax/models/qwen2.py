"""Qwen2 and Qwen2.5: three pure parts around attention, which belongs to the engine.

`model.embed(tokens)` gives hidden states, `model.layers` is one `Qwen2Layer` whose arrays have a leading layer axis,
`model.head(h)` gives the two factors of the logits. A layer has `attention_inputs(h, positions) -> q, k, v` and
`attention_output(h, o) -> h`.
Modules are Flax NNX pytrees and are never mutated. Attribute names are those of `transformers`; a linear weight is
stored `[in, out]`, the transpose of the file's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from oomb_jax.models import rope as rotary
from oomb_jax.pallas_kernels.matmul import matmul
from oomb_jax.shapes import Hidden, Keys, Positions, Queries, Values, accumulator


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a Qwen2 model, named as in the `config.json` of a Hugging Face directory."""

    vocab_size: int
    """V: rows of the embedding."""

    hidden_size: int
    """D: width of the residual stream."""

    intermediate_size: int
    """F: width of the feed-forward block."""

    num_hidden_layers: int
    """L: layers."""

    num_attention_heads: int
    """N: query heads, a multiple of `num_key_value_heads`."""

    num_key_value_heads: int
    """M: key/value heads."""

    head_dim: int
    """H: width of a head, even. Usually `hidden_size / num_attention_heads`."""

    rope: rotary.Rope = dataclasses.field(default_factory=rotary.Rope)
    """Frequencies of the rotary position embedding, with their scaling."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""

    tie_word_embeddings: bool = False
    """Whether the head uses the embedding's weight."""

    initializer_range: float = 0.02
    """Standard deviation of random weights."""

    bos_token_id: int | None = None
    """Token at the start of a text, if the vocabulary has one. Only kept for `models.save`."""

    eos_token_id: int | tuple[int, ...] | None = None
    """Token or tokens at the end of a text, if the vocabulary has any."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name}={value}: at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads}: a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2 or self.head_dim < 4:
            raise ValueError(f"head_dim={self.head_dim}: an even number from 4, for RoPE turns pairs of dimensions")


class Linear(nnx.Module):
    """`x @ weight + bias`."""

    def __init__(
        self, d_in: int, d_out: int, *, key: Key[Array, ""], stddev: float, dtype: DTypeLike, bias: bool = False
    ):
        """Weight `[d_in, d_out]` from a normal distribution, bias zero."""
        self.weight = nnx.Param(_normal(key, (d_in, d_out), stddev, dtype))
        self.bias = nnx.Param(jnp.zeros(d_out, dtype)) if bias else None

    def __call__(self, x: Float[Array, "C I"]) -> Float[Array, "C O"]:
        """Apply in the dtype of the weight."""
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]


class RMSNorm(nnx.Module):
    """`weight * x / sqrt(mean(x**2) + eps)`, the quotient in the accumulator dtype and rounded before the product."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike):
        """Weight one."""
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Hidden) -> Hidden:
        """Normalise each row; the result has the dtype of the weight."""
        weight = self.weight[...]
        x = x.astype(accumulator(x.dtype))
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x.astype(weight.dtype) * weight[None]


class Embedding(nnx.Module):
    """A row of `weight [V, D]` for each token."""

    def __init__(self, vocabulary: int, width: int, *, key: Key[Array, ""], stddev: float, dtype: DTypeLike):
        """Weight from a normal distribution."""
        self.weight = nnx.Param(_normal(key, (vocabulary, width), stddev, dtype))

    def __call__(self, tokens: Int[Array, " C"]) -> Hidden:
        """Look the tokens up."""
        return self.weight[...][tokens]


class Qwen2Layer(nnx.Module):
    """One layer without its attention: what comes before it and what comes after."""

    def __init__(self, config: ModelConfig, *, key: Key[Array, ""], dtype: DTypeLike):
        """Random weights of one layer, without a layer axis."""
        D, F = config.hidden_size, config.intermediate_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        q, k, v, o, gate, up, down = jax.random.split(key, 7)
        init = {"stddev": config.initializer_range, "dtype": dtype}
        self.config = config
        self.input_layernorm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.q_proj = Linear(D, queries, key=q, bias=True, **init)
        self.k_proj = Linear(D, keys, key=k, bias=True, **init)
        self.v_proj = Linear(D, keys, key=v, bias=True, **init)
        self.o_proj = Linear(queries, D, key=o, **init)
        self.post_attention_layernorm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.gate_proj = Linear(D, F, key=gate, **init)
        self.up_proj = Linear(D, F, key=up, **init)
        self.down_proj = Linear(F, D, key=down, **init)

    def attention_inputs(self, h: Hidden, positions: Positions) -> tuple[Queries, Keys, Values]:
        """Queries, keys and values of normalised hidden states; queries and keys are turned by their positions."""
        config = self.config
        x = self.input_layernorm(h)
        q, k, v = (
            projection(x).reshape(len(x), -1, config.head_dim) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = rotary.cos_sin(config.rope, config.head_dim, positions, x.dtype)
        return rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin), v

    def attention_output(self, h: Hidden, o: Queries) -> Hidden:
        """Add the projected attention output, then the SwiGLU feed-forward block."""
        h = h + self.o_proj(o.reshape(len(o), -1))
        x = self.post_attention_layernorm(h)
        return h + self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen2(nnx.Module):
    """A Qwen2 language model as an immutable pytree: `embed`, the stacked `layers`, `head`."""

    def __init__(self, config: ModelConfig, *, key: Key[Array, ""], dtype: DTypeLike):
        """Random weights: normal with `config.initializer_range`, biases 0, norms 1."""
        embed, layers, head = jax.random.split(key, 3)
        V, D = config.vocab_size, config.hidden_size
        init = {"stddev": config.initializer_range, "dtype": dtype}
        self.config = config
        self.embed_tokens = Embedding(V, D, key=embed, **init)
        # One layer after the other: the float32 temporaries of the random numbers are those of one layer.
        self.layers = jax.lax.map(
            lambda key: Qwen2Layer(config, key=key, dtype=dtype), jax.random.split(layers, config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(D, V, key=head, **init)

    def embed(self, tokens: Int[Array, " C"]) -> Hidden:
        """Hidden states before the first layer, in the parameter dtype."""
        return self.embed_tokens(tokens)

    def head(self, h: Hidden) -> tuple[Hidden, Float[Array, "D V"]]:
        """`x, weight`: the logits of hidden states after the last layer are `x @ weight`."""
        weight = self.embed_tokens.weight[...].T if self.lm_head is None else self.lm_head.weight[...]
        return self.norm(h), weight


def _normal(key: Key[Array, ""], shape: tuple[int, int], stddev: float, dtype: DTypeLike) -> Array:
    rows, columns = shape[0], shape[1:]

    def row(key: Key[Array, ""]) -> Array:
        # A normal drawn in bfloat16 would take few values and have short tails.
        return (jax.random.normal(key, columns, accumulator(dtype)) * stddev).astype(dtype)

    # A few rows at a time (4 Mi numbers): the embedding of a large model has gigabytes of temporaries otherwise.
    return jax.lax.map(row, jax.random.split(key, rows), batch_size=max(1, 2**22 // shape[1]))
