"""The two ends of a chunk: the loss and its gradient through the head, and the gradient of the embedding."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.pallas_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_vjp
from oomb_jax.parts import add
from oomb_jax.shapes import Hidden, Scalar, accumulator, divisor

EMBED_ROWS = 4096
"""Tokens whose embedding gradients are summed together, by a matrix of so many rows and columns."""


def head_losses(outer: Any, h: Hidden, labels: Int[Array, " C"]) -> Float[Array, " C"]:
    """The loss of each token: logsumexp(logits) - logits[label], 0 where there is no label."""
    x, weight = outer.head(h)
    return linear_cross_entropy(x, weight, labels)


def head_gradient(
    outer: Any, grads: Any, h: Hidden, labels: Int[Array, " C"], weight: Scalar
) -> tuple[Scalar, Hidden, Any]:
    """The weighted loss of a chunk, its gradient with respect to h, and `grads` with that of the outer part added."""
    x, inputs_vjp = jax.vjp(lambda outer, h: outer.head(h)[0], outer, h)
    # As in `embed_gradient`, so that the gradient of the matrix stays float32.
    _, matrix_vjp = jax.vjp(lambda outer: outer.head(h.astype(weight.dtype))[1], _widened(outer, weight.dtype))
    losses, dx, grads = linear_cross_entropy_vjp(
        *(x, outer.head(h)[1], labels, jnp.full(labels.shape, weight), grads),
        add=lambda grads, more: add(grads, matrix_vjp(more)[0]),
    )
    more, dh = inputs_vjp(dx)
    return jnp.sum(losses) * weight, dh, add(grads, more)


def embed_gradient(outer: Any, grads: Any, tokens: Int[Array, " C"], dh: Hidden) -> Any:
    """`grads` with the gradient of embedding the tokens added, summed in float32 (float64).

    A plain scatter-add would sum the rows of a repeated token in bfloat16, and on a GPU in an order that changes from
    run to run. Here a 0/1 matrix sums the rows of each distinct token first, then every token is scattered once.
    """
    dtype = accumulator(dh.dtype)
    wide = _widened(outer, dtype)
    rows = divisor(tokens.shape[0], EMBED_ROWS)

    def block(i, grads):
        tokens, dh = (x[i] for x in blocks)
        unique = jnp.unique(tokens, size=rows, fill_value=-1)
        same = (unique[:, None] == tokens[None, :]).astype(dh.dtype)
        sums = jnp.matmul(same, dh, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
        h, vjp = jax.vjp(lambda outer: outer.embed(jnp.maximum(unique, 0)), wide)
        return add(grads, vjp(sums.astype(h.dtype))[0])

    blocks = tokens.reshape(-1, rows), dh.reshape(-1, rows, dh.shape[1])
    # XLA must not know the number of blocks: of a single one it may make the zeros that the table's gradient begins
    # with before the layers go back, beside all that they kept; of a large vocabulary these are gigabytes.
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(len(blocks[0]))), block, grads)


def _widened(outer: Any, dtype) -> Any:
    """`outer` in `dtype`. Cast only in name where a vector-Jacobian product uses no value, as of a lookup."""
    return jax.tree.map(lambda x: x.astype(dtype), outer)
