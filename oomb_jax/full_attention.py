"""The yardstick: the same loss by ordinary attention over the whole sequence and ordinary automatic differentiation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from oomb_jax.config import Config
from oomb_jax.loss import cross_entropy
from oomb_jax.parts import key_shape, split
from oomb_jax.sequence import check_batch, loss_weight, segment_positions, segments_ordered
from oomb_jax.shapes import Labels, Scalar, Segments, Tokens, accumulator, iota


def full_attention_value_and_grad(
    model: Any,
    pools: None,
    tokens: Tokens,
    labels: Labels,
    config: Config,
    segments: Segments | None = None,
) -> tuple[Scalar, Any, None]:
    """Same arguments and result as `value_and_grad`, without pools. Memory grows with T squared."""
    tokens, labels, segments = check_batch(tokens, labels, segments)
    weight = loss_weight(labels, accumulator(key_shape(model).dtype))

    def loss(model):
        one = lambda row: sequence_loss(model, *row)
        return jnp.sum(lax.map(one, (tokens, labels, segments))) * weight

    value, grads = jax.value_and_grad(loss)(model)
    if segments is not None:
        value = jnp.where(segments_ordered(segments), value, jnp.nan)
    grads = jax.tree.map(lambda g: g.astype(config.grad_dtype or accumulator(g.dtype)), grads)
    return value, grads, None


def sequence_loss(
    model: Any, tokens: Int[Array, " T"], labels: Int[Array, " T"], segments: Int[Array, " T"] | None
) -> Scalar:
    """The summed loss of one sequence."""
    outer, layers = split(model)
    index = iota(tokens.shape[0])
    positions = index if segments is None else segment_positions(segments)
    mask = index[:, None] >= index[None, :]
    if segments is not None:
        mask &= segments[:, None] == segments[None, :]

    def body(h, layer):
        q, k, v = layer.attention_inputs(h, positions)
        return layer.attention_output(h, attention(q, k, v, mask)), None

    h, _ = lax.scan(body, outer.embed(tokens), layers)
    return jnp.sum(cross_entropy(outer, h, labels))


def attention(
    q: Float[Array, "T N H"], k: Float[Array, "T M H"], v: Float[Array, "T M H"], mask: Bool[Array, "T T"]
) -> Float[Array, "T N H"]:
    """softmax(q·k / sqrt(H)) v over the keys that the mask allows, in float32 (float64)."""
    T, N, H = q.shape
    M = k.shape[1]
    dtype = accumulator(q.dtype)
    grouped = q.reshape(T, M, N // M, H).astype(dtype)
    dot = lambda equation, a, b: jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
    scores = dot("tmgh,umh->mgtu", grouped, k.astype(dtype)) * H**-0.5
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf), axis=-1)
    return dot("mgtu,umh->tmgh", weights, v.astype(dtype)).reshape(T, N, H).astype(q.dtype)
