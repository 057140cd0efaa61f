"""The two ends of a chunk: logits, loss and their gradients in row blocks, and the gradient of the embedding."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.parts import add
from oomb_jax.shapes import IGNORE, Hidden, Scalar, accumulator, divisor

BLOCK_LOGITS = 2**26
"""Logits that exist at a time: 256 MiB of float32."""

EMBED_ROWS = 4096
"""Tokens whose embedding gradients are summed together, by a matrix of so many rows and columns."""


def cross_entropy(outer: Any, h: Float[Array, "R D"], labels: Int[Array, " R"]) -> Float[Array, " R"]:
    """logsumexp(logits) - logits[label] of each row, in float32 (float64), 0 where there is no label."""
    logits = outer.head(h).astype(accumulator(h.dtype))
    valid = labels != IGNORE
    picked = jnp.take_along_axis(logits, jnp.where(valid, labels, 0)[:, None], axis=1)[:, 0]
    return jnp.where(valid, jax.nn.logsumexp(logits, axis=1) - picked, 0)


def head_losses(outer: Any, h: Hidden, labels: Int[Array, " C"]) -> Float[Array, " C"]:
    """`cross_entropy` of a chunk without [C, V] logits."""
    return lax.map(lambda block: cross_entropy(outer, *block), _row_blocks(outer, h, labels)).reshape(-1)


def head_gradient(
    outer: Any, grads: Any, h: Hidden, labels: Int[Array, " C"], weight: Scalar
) -> tuple[Scalar, Hidden, Any]:
    """The weighted loss of a chunk, its gradient with respect to h, and `grads` with that of the outer part added."""

    def block(grads, rows):
        h, labels = rows
        loss, vjp = jax.vjp(lambda outer, h: jnp.sum(cross_entropy(outer, h, labels)) * weight, outer, h)
        more, dh = vjp(jnp.ones_like(loss))
        return add(grads, more), (loss, dh)

    grads, (losses, dh) = lax.scan(block, grads, _row_blocks(outer, h, labels))
    return jnp.sum(losses), dh.reshape(h.shape), grads


def embed_gradient(outer: Any, grads: Any, tokens: Int[Array, " C"], dh: Hidden) -> Any:
    """`grads` with the gradient of embedding the tokens added, summed in float32 (float64).

    A plain scatter-add would sum the rows of a repeated token in bfloat16, and on a GPU in an order that changes from
    run to run. Here a 0/1 matrix sums the rows of each distinct token first, then every token is scattered once.
    """
    dtype = accumulator(dh.dtype)
    # Cast only in name: of a lookup's vector-Jacobian product no value of the table is used.
    wide = jax.tree.map(lambda x: x.astype(dtype), outer)
    rows = divisor(tokens.shape[0], EMBED_ROWS)

    def block(grads, part):
        tokens, dh = part
        unique = jnp.unique(tokens, size=rows, fill_value=-1)
        same = (unique[:, None] == tokens[None, :]).astype(dh.dtype)
        sums = jnp.matmul(same, dh, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
        h, vjp = jax.vjp(lambda outer: outer.embed(jnp.maximum(unique, 0)), wide)
        return add(grads, vjp(sums.astype(h.dtype))[0]), None

    return lax.scan(block, grads, (tokens.reshape(-1, rows), dh.reshape(-1, rows, dh.shape[1])))[0]


def _row_blocks(outer: Any, h: Hidden, labels: Int[Array, " C"]):
    V = jax.eval_shape(lambda outer, h: outer.head(h), outer, h).shape[1]
    rows = divisor(h.shape[0], max(1, BLOCK_LOGITS // V))
    return h.reshape(-1, rows, h.shape[1]), labels.reshape(-1, rows)
