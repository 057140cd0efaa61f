"""The yardstick: the same loss by ordinary attention over the whole sequence and ordinary automatic differentiation."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from oomb_jax.config import Config
from oomb_jax.loss import embed_gradient, head_gradient
from oomb_jax.parts import add, join, key_shape, layer_count, split, zero_gradients
from oomb_jax.sequence import check_batch, chunk_count, chunk_length, loss_weight, segment_positions, segments_ordered
from oomb_jax.shapes import IGNORE, Labels, Scalar, Segments, Tokens, accumulator, iota


def full_attention_value_and_grad(
    model: Any,
    pools: None,
    tokens: Tokens,
    labels: Labels,
    config: Config,
    segments: Segments | None = None,
    *,
    selection: Int[Array, "..."] | None = None,
    implementation: Literal["reference", "cudnn"] = "reference",
) -> tuple[Scalar, Any, None]:
    """Same arguments and result as `value_and_grad`, without pools.

    Args:
      model, pools, tokens, labels, config, segments: as for `value_and_grad`.
      selection: what `TopK` chose, to restrict attention to it: page ids [L, n·C/S, K] of each layer and query page, or
        [L, n·C/S, M, K] with a list for each key/value head, and in front of that the batch axis of the tokens, if they
        have one. -1 = none. Every query attends to its own chunk besides. None: to every earlier token.
      implementation: `"reference"`, float32 attention that keeps its scores: exact, and memory grows with T squared.
        `"cudnn"`, the way to train on a GPU without this library: cuDNN's attention and a checkpoint for each layer.

    Raises:
      ValueError: as `value_and_grad` does, or the selection has another shape.
      NotImplementedError: segments or a selection with `"cudnn"`.
    """
    if selection is not None and tokens.ndim == 1:
        selection = selection[None]
    tokens, labels, segments = check_batch(tokens, labels, segments)
    if selection is not None:
        _check_selection(selection, tokens.shape, model, config)
    weight = loss_weight(labels, accumulator(key_shape(model).dtype))
    if implementation == "cudnn":
        if segments is not None or selection is not None:
            raise NotImplementedError("implementation='cudnn' knows no segments and no selection; pass 'reference'")
        one = lambda grads, row: _checkpointed(model, grads, row[0], row[1], weight)
        grads, losses = lax.scan(one, zero_gradients(model, config), (tokens, labels))
        return jnp.sum(losses), grads, None

    def loss(model):
        one = lambda row: sequence_loss(model, config, *row)
        return jnp.sum(lax.map(one, (tokens, labels, segments, selection))) * weight

    value, grads = jax.value_and_grad(loss)(model)
    if segments is not None:
        value = jnp.where(segments_ordered(segments), value, jnp.nan)
    grads = jax.tree.map(lambda g: g.astype(config.grad_dtype or accumulator(g.dtype)), grads)
    return value, grads, None


def sequence_loss(
    model: Any,
    config: Config,
    tokens: Int[Array, " T"],
    labels: Int[Array, " T"],
    segments: Int[Array, " T"] | None,
    selection: Int[Array, "L pages *M K"] | None,
) -> Scalar:
    """The summed loss of one sequence."""
    outer, layers = split(model)
    index = iota(tokens.shape[0])
    positions = index if segments is None else segment_positions(segments)
    mask = index[:, None] >= index[None, :]
    if segments is not None:
        mask &= segments[:, None] == segments[None, :]

    def body(h, x):
        layer, chosen = x
        q, k, v = layer.attention_inputs(h, positions)
        seen = mask[None] if chosen is None else mask[None] & selected(chosen, len(tokens), config)
        return layer.attention_output(h, attention(q, k, v, seen)), None

    h, _ = lax.scan(body, outer.embed(tokens), (layers, selection))
    x, weight = outer.head(h)
    logits = jnp.dot(x, weight, preferred_element_type=accumulator(x.dtype))
    valid = labels != IGNORE
    picked = jnp.take_along_axis(logits, jnp.where(valid, labels, 0)[:, None], axis=1)[:, 0]
    return jnp.sum(jnp.where(valid, jax.nn.logsumexp(logits, axis=1) - picked, 0))


def selected(table: Int[Array, "pages *M K"], T: int, config: Config) -> Bool[Array, "m T T"]:
    """Whether query t may look at token u: a token of its chunk, or of a page that its query page chose."""
    pages = len(table)
    lists = jnp.moveaxis(table.reshape(pages, -1, table.shape[-1]), 1, 0)  # one, or one for each key/value head
    chosen = jnp.any(lists[..., None] == iota(pages)[None, None, None], axis=2)
    page, chunk = (iota(T) // size for size in (config.page, chunk_length(T, config)))
    return chosen[:, page][:, :, page] | (chunk[:, None] == chunk[None])[None]


def attention(
    q: Float[Array, "T N H"], k: Float[Array, "T M H"], v: Float[Array, "T M H"], mask: Bool[Array, "m T T"]
) -> Float[Array, "T N H"]:
    """softmax(q·k / sqrt(H)) v over the keys that the mask allows, one for all heads or one for each key/value head, in
    float32 (float64)."""
    T, N, H = q.shape
    M = k.shape[1]
    dtype = accumulator(q.dtype)
    grouped = q.reshape(T, M, N // M, H).astype(dtype)
    dot = lambda equation, a, b: jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
    scores = dot("tmgh,umh->mgtu", grouped, k.astype(dtype)) * H**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return dot("mgtu,umh->tmgh", weights, v.astype(dtype)).reshape(T, N, H).astype(q.dtype)


def _checkpointed(model: Any, grads: Any, tokens: Int[Array, " T"], labels: Int[Array, " T"], weight: Scalar):
    """`grads` with the gradient of one sequence added, and its weighted loss."""
    outer, layers = split(model)
    positions = iota(tokens.shape[0])

    @jax.checkpoint
    def layer_output(h, layer):
        q, k, v = layer.attention_inputs(h, positions)
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return layer.attention_output(h, o)

    trunk = lambda layers, h: lax.scan(lambda h, layer: (layer_output(h, layer), None), h, layers)[0]
    h, trunk_vjp = jax.vjp(trunk, layers, outer.embed(tokens))
    outer_grads, layer_grads = split(grads)
    loss, dh, outer_grads = head_gradient(outer, outer_grads, h, labels, weight)
    more, dh = trunk_vjp(dh)
    outer_grads = embed_gradient(outer, outer_grads, tokens, dh)
    return join(outer_grads, add(layer_grads, more)), loss


def _check_selection(selection: Int[Array, "B ..."], shape: tuple[int, ...], model: Any, config: Config) -> None:
    B, T = shape
    M = key_shape(model).shape[1]
    lists = B, layer_count(model.layers), chunk_count(T, config) * chunk_length(T, config) // config.page
    if selection.shape[:-1] not in (lists, (*lists, M)):
        raise ValueError(
            f"selection has shape {selection.shape}: [B, L, n*C/S, K] is {[*lists, 'K']} here, or with a list for each "
            f"key/value head {[*lists, M, 'K']}; B only where the tokens have it"
        )
