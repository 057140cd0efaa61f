"""Cross-entropy of x @ weight in row tiles: the logits of one tile exist at a time.

The three matrix products, logits = x W, dx = dlogits Wᵀ and dW = xᵀ dlogits, are XLA's, of the inputs' dtype with
float32 sums. Logits and their softmax are float32; dlogits are rounded to the inputs' dtype, as every gradient of an
activation is. No logit is computed twice.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.shapes import IGNORE, accumulator, divisor, iota

TILE_LOGITS = 2**28
"""Logits of a tile, at most: 1 GiB of float32. With fewer rows dW, which is read and written once a tile, gets slow."""


def linear_cross_entropy(
    x: Float[Array, "R D"], weight: Float[Array, "D V"], labels: Int[Array, " R"]
) -> Float[Array, " R"]:
    """loss_i = logsumexp(x_i W) - (x_i W)[label_i] in float32 (float64), 0 where label_i is -100 and NaN where no
    column has that number."""
    losses = lambda tile: _softmax(tile[0], weight, tile[1])[0]
    return lax.map(losses, _tiles(weight.shape[1], x, labels)).reshape(-1)


def linear_cross_entropy_vjp(
    x: Float[Array, "R D"],
    weight: Float[Array, "D V"],
    labels: Int[Array, " R"],
    d_losses: Float[Array, " R"],
    d_weight: Any,
    add: Callable[[Any, Float[Array, "D V"]], Any] = operator.add,
) -> tuple[Float[Array, " R"], Float[Array, "R D"], Any]:
    """`linear_cross_entropy` and its gradients in one pass.

    Args:
      x: inputs of the output layer.
      weight: its matrix.
      labels: int32; -100 = no loss.
      d_losses: gradient of the losses, float32 (float64).
      d_weight: what the gradient of the weight is added to, once for each tile.
      add: `add(d_weight, more)` adds the share of one tile, float32 (float64) [D, V].

    Returns:
      losses, dx in the dtype of x, and d_weight.
    """

    def tile(d_weight, rows):
        x, labels, d_losses = rows
        losses, softmax, is_label = _softmax(x, weight, labels)
        scale = jnp.where(labels != IGNORE, d_losses, 0)
        d_logits = ((softmax - is_label.astype(softmax.dtype)) * scale[:, None]).astype(x.dtype)
        dx = lax.dot_general(d_logits, weight, (((1,), (1,)), ((), ())))
        more = lax.dot_general(x, d_logits, (((0,), (0,)), ((), ())), preferred_element_type=softmax.dtype)
        return add(d_weight, more), (losses, dx)

    d_weight, (losses, dx) = lax.scan(tile, d_weight, _tiles(weight.shape[1], x, labels, d_losses))
    return losses.reshape(-1), dx.reshape(x.shape), d_weight


def _softmax(x: Float[Array, "R D"], weight: Float[Array, "D V"], labels: Int[Array, " R"]):
    """Losses, softmax of the logits, and where the labels are (by comparison, which needs no gather)."""
    logits = jnp.dot(x, weight, preferred_element_type=accumulator(x.dtype))
    is_label = iota(logits.shape[1])[None, :] == labels[:, None]
    maximum = logits.max(axis=1)
    weights = jnp.exp(logits - maximum[:, None])
    total = weights.sum(axis=1)
    losses = jnp.log(total) + maximum - jnp.sum(jnp.where(is_label, logits, 0), axis=1)
    losses = jnp.where((labels >= 0) & (labels < logits.shape[1]), losses, jnp.nan)
    return jnp.where(labels != IGNORE, losses, 0), weights / total[:, None], is_label


def _tiles(V: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays of R rows as [tiles, rows of a tile, ...]."""
    rows = divisor(arrays[0].shape[0], max(1, TILE_LOGITS // V))
    return tuple(x.reshape(-1, rows, *x.shape[1:]) for x in arrays)
