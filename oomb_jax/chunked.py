"""Chunk-recurrent training: the loss of a whole sequence and its gradient, with the activations of one chunk.

With chunks c = 0 .. n-1, K_c, V_c the keys and values of chunk c in a layer, and K_<c those of all chunks before it,

    fill       for c = 0 .. n-2:  run the layers on chunk c, attending to K_<c and K_c; keep only K_c, V_c in the pool.
    reverse    for c = n-1 .. 0:  run chunk c again; take the loss; go back through its layers. In each layer
                   dK_<c += d loss_c / d K_<c           (into the gradient pool)
                   dK_c   = d loss_c / d K_c + pool[c]  (what chunks c+1 .. n-1 have left there)
               and dK_c, dV_c flow on into the projections of chunk c.

A loss depends on earlier chunks only through their keys and values, so the result is the gradient of the whole
sequence, exactly. Source: "Out of the Memory Barrier" (arXiv 2602.02108).

A layer is `attention_inputs(h, positions) -> q, k, v`, attention, `attention_output(h, o) -> h`. This module owns the
attention and the pools and takes `jax.vjp` of the two other parts; no automatic differentiation runs through a pool.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from oomb_jax.chunk import Chunk
from oomb_jax.config import Config
from oomb_jax.fetching import Fetched, Wanted, downwards, fetch, here_and_ahead, upwards
from oomb_jax.forward import Filling, forward, together
from oomb_jax.layer_loops import Kept, go_down, go_up
from oomb_jax.loss import embed_gradient, head_gradient, head_losses
from oomb_jax.pallas_kernels.matmul import PRODUCT
from oomb_jax.parts import join, key_shape, layer_at, layer_count, reads, split, zero_gradients
from oomb_jax.placement import Group, attention, attention_vjp, groups, missing_slots
from oomb_jax.pools import Pools, check_pools, clear_gradients
from oomb_jax.sequence import Sequence, check_batch, cut, loss_weight, segments_ordered, top_k
from oomb_jax.shapes import (
    Hidden,
    Keys,
    Labels,
    Queries,
    Scalar,
    Segments,
    Tokens,
    Values,
    accumulator,
    iota,
)


def value_and_grad(
    model: Any,
    pools: Pools,
    tokens: Tokens,
    labels: Labels,
    config: Config,
    segments: Segments | None = None,
) -> tuple[Scalar, Any, Pools]:
    """The mean loss over valid labels, its gradient, and the pools. Pure; under `jax.jit` donate the pools:

        step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")

    Args:
      model: parts `embed`, `layers`, `head`; see docs/your-model.md.
      pools: from `create_pools(model, ctx, config)` with ctx >= T. What they hold does not matter.
      tokens: int32 [T] or [B, T], any T >= 1. The sequences of a batch go one at a time through the same pools.
      labels: int32, the same shape, already shifted; -100 = no loss.
      config: settings of the method.
      segments: int32, the same shape, never decreasing along a sequence: a token attends only to its own segment, in
        which positions start at 0. None: one segment.

    Returns:
      loss: float32 (float64 for a float64 model); 0 where no label is valid. NaN where segments decrease but are
        traced, so that nobody could look at them before; NaN, as the gradients, where the chosen pages take more
        than `config.kv_grad_pages`.
      grads: a pytree like the model, of `config.grad_dtype`.
      pools: to be passed to the next call.

    Raises:
      ValueError: shapes do not fit together, the pools are too small, or segments decrease.
    """
    tokens, labels, segments = check_batch(tokens, labels, segments)
    check_pools(pools, tokens.shape[1], config, gradients=True)
    weight = loss_weight(labels, accumulator(key_shape(model).dtype))

    def one(carry: Carry, row):
        tokens, labels, segments = row
        sequence = cut(tokens, labels, segments, config)
        filling = start_filling(model, clear_gradients(carry.pools), sequence, config)
        pools = fill(model, filling, sequence, config, iota(fill_chunks(sequence, config))).pools
        missing = missing_slots(pools, sequence, config)
        valid = weight if missing is None else jnp.where(missing > 0, jnp.nan, weight)
        carry = Carry(pools=pools, grads=carry.grads)
        carry, losses = reverse(model, carry, sequence, valid, config, iota(sequence.chunks)[::-1])
        return carry, jnp.sum(losses)

    carry = Carry(pools=pools, grads=zero_gradients(model, config))
    carry, losses = lax.scan(one, carry, (tokens, labels, segments))
    loss = jnp.sum(losses)
    if segments is not None:
        loss = jnp.where(segments_ordered(segments), loss, jnp.nan)
    return loss, carry.grads, carry.pools


def token_losses(
    model: Any,
    pools: Pools,
    tokens: Tokens,
    labels: Labels,
    config: Config,
    segments: Segments | None = None,
) -> tuple[Float[Array, "*B T"], Pools]:
    """The loss of every token, 0 where its label is -100, in one forward pass. Arguments as for `value_and_grad`; the
    gradient pools are not used and may be left out. NaN where segments decrease but are traced."""
    shape = tokens.shape
    tokens, labels, segments = check_batch(tokens, labels, segments)
    check_pools(pools, tokens.shape[1], config)

    def one(pools, row):
        tokens, labels, segments = row
        sequence = cut(tokens, labels, segments, config)
        filling = start_filling(model, pools, sequence, config)
        filling, losses = evaluate(model, filling, sequence, config, iota(sequence.chunks))
        return filling.pools, losses

    pools, losses = lax.scan(one, pools, (tokens, labels, segments))
    if segments is not None:
        losses = jnp.where(segments_ordered(segments), losses, jnp.nan)
    return losses.reshape(tokens.shape[0], -1)[:, : tokens.shape[1]].reshape(shape), pools


class Carry(NamedTuple):
    """What the reverse pass hands on from a chunk to the one before it."""

    pools: Pools
    grads: Any
    """Sums of the parameters' gradients, a pytree like the model."""


def fill_chunks(sequence: Sequence, config: Config) -> int:
    """How many chunks the fill pass takes. No chunk attends to the last one, so that it need not be filled; with Top-K
    attention it must choose its pages."""
    return sequence.chunks - (1 if top_k(sequence.chunks * sequence.chunk, config) is None else 0)


def start_filling(model: Any, pools: Pools, sequence: Sequence, config: Config) -> Filling:
    """What the first chunk of the fill pass begins with."""
    if top_k(sequence.chunks * sequence.chunk, config) is None:
        return Filling(pools, None)
    keys = key_shape(model)
    pages = sequence.chunks * sequence.chunk // config.page
    return Filling(pools, jnp.zeros((layer_count(model.layers), pages, *keys.shape[1:]), keys.dtype))


def fill(model: Any, filling: Filling, sequence: Sequence, config: Config, chunks: Int[Array, " c"]) -> Filling:
    """Writes the keys and values of the given chunks, in rising order, into the pools, and with Top-K attention the
    pages that they choose. Activations are dropped, and the last layer stops at its keys and values."""
    outer, layers = split(model)

    def some(filling, numbers):
        one_or_two = [Chunk.of(sequence, c, config) for c in numbers]
        h = [outer.embed(sequence.tokens[c]) for c in numbers]
        return forward(layers, one_or_two, filling, h, last_output=False)[1], None

    size = together(filling.pools, config)
    most, rest = jnp.split(chunks, [len(chunks) // size * size])
    with jax.named_scope("fill"):
        for part in most.reshape(-1, size), rest[:, None]:
            if len(part):
                filling, _ = lax.scan(some, filling, part)
    return filling


def evaluate(
    model: Any, filling: Filling, sequence: Sequence, config: Config, chunks: Int[Array, " c"]
) -> tuple[Filling, Float[Array, "c C"]]:
    """Fills the pools with the given chunks, in rising order, and returns the losses of their tokens."""
    outer, layers = split(model)

    def one(filling, c):
        chunk = Chunk.of(sequence, c, config)
        (h,), filling = forward(layers, [chunk], filling, [outer.embed(sequence.tokens[c])], last_output=True)
        return filling, head_losses(outer, h, sequence.labels[c])

    return lax.scan(one, filling, chunks)


def reverse(
    model: Any, carry: Carry, sequence: Sequence, weight: Scalar, config: Config, chunks: Int[Array, " c"]
) -> tuple[Carry, Float[Array, " c"]]:
    """Recomputes the given chunks, in falling order, and adds their gradients.

    Args:
      model: as in `value_and_grad`.
      carry: pools that are filled with the chunks before these, and to whose gradients all chunks after these were
        added; before the last chunk they are 0.
      sequence: the sequence, from `cut`.
      weight: what the loss of one token counts, from `loss_weight`.
      config: the settings that the pools were made with.
      chunks: indices of chunks.

    Returns:
      The carry, and each chunk's share of the loss.
    """
    outer, layers = split(model)

    def one(carry: Carry, c):
        chunk = Chunk.of(sequence, c, config)
        outer_grads, layer_grads = split(carry.grads)
        with jax.named_scope("recompute"):
            h, kept, last = _layers_recompute(layers, chunk, carry.pools, outer.embed(sequence.tokens[c]))
        with jax.named_scope("head"):
            loss, dh, outer_grads = head_gradient(outer, outer_grads, h, sequence.labels[c], weight)
        with jax.named_scope("backward"):
            dh, pools, layer_grads = _layers_backward(layers, chunk, carry.pools, dh, kept, last, layer_grads)
            outer_grads = embed_gradient(outer, outer_grads, sequence.tokens[c], dh)
        return Carry(pools=pools, grads=join(outer_grads, layer_grads)), loss

    return lax.scan(one, carry, chunks)


class _Saved(NamedTuple):
    """What the recomputed forward pass of a layer keeps. The two vector-Jacobian products are pytrees without the
    layer's parameters and inputs in them, which `saveable_args` leaves out: stacked over layers they would be a second
    copy of the model."""

    h: Hidden
    inputs_vjp: Any
    q: Queries
    k: Keys
    v: Values
    o: Queries
    lse: Float[Array, "N C"]
    output_vjp: Any


class _KeptGroup(NamedTuple):
    """What the recomputed forward pass of a group of layers keeps."""

    group: Group
    wanted: Wanted | None
    saved: Kept


def _layers_recompute(
    layers: Any, chunk: Chunk, pools: Pools, h: Hidden
) -> tuple[Hidden, list[_KeptGroup], Fetched | None]:
    """All layers again, keeping for the backward pass what `config.remat` says; and the pages of the last layer, with
    which that pass begins, where they are fetched."""
    remat = _remat(chunk.config)

    def keeping(group, part, *arguments):
        """What the part gives, and its vector-Jacobian product. Gradients are added to pools on the way back alone."""
        with group.products(chunk.config, adding=True):
            result, vjp = jax.vjp(remat(part), *arguments, saveable_args=False)
        # Where all is computed again on the way back, nothing is kept of that result: it falls away for one that leaves
        # multiprocessors to fetches alone.
        return part(*arguments) if chunk.config.remat == "full" else result, vjp

    def body(group, l, carry, turn):
        h, came = carry
        # What is fetched here comes into a buffer that the layer before has read from.
        h, turn = lax.optimization_barrier((h, turn))
        layer = layer_at(layers, l)
        here, ahead = here_and_ahead(pools, group, chunk, l, came, turn)
        inputs = lambda layer, h: layer.attention_inputs(h, chunk.positions)
        (q, k, v), inputs_vjp = keeping(group, inputs, layer, h)
        o, lse = attention(chunk, here, q, k, v)
        output = lambda layer, h, o: layer.attention_output(h, o)
        result, output_vjp = keeping(group, output, layer, h, o)
        # Without the barrier XLA fuses a kernel with the write of its result into the stack, and where that result has
        # another use runs the kernel a second time for it. The fetch may take as long as the layer computes: it ends
        # here, and XLA begins it early only if that write is not under way in the meantime.
        keep = _Saved(h, inputs_vjp, q, k, v, o, lse, output_vjp)
        if ahead is None:
            return (result, None), lax.optimization_barrier(keep)
        result, ahead, keep = lax.optimization_barrier((result, ahead, keep))
        return (result, ahead), keep

    kept, last, found = [], None, groups(pools, chunk.config)
    for group in found:
        wanted = Wanted.of(pools, group, chunk)
        first, turns = upwards(wanted, again=group is found[-1])
        step = functools.partial(body, group)
        carry, n = (h, fetch(pools, group, first)), group.stop - group.start
        with group.products(chunk.config):
            (h, last), saved = go_up(step, jnp.int32(group.start), carry, turns, n, pairs=group.staged)
        kept.append(_KeptGroup(group, wanted, saved))
    return h, kept, last


def _layers_backward(
    layers: Any, chunk: Chunk, pools: Pools, dh: Hidden, kept: list[_KeptGroup], last: Fetched | None, grads: Any
) -> tuple[Hidden, Pools, Any]:
    """Back through all layers: the gradient of the chunk's embeddings, the pools, the layers' gradients."""

    # With barriers around each part it is compiled the same wherever the layer stands: XLA takes a loop over a single
    # layer, or pair, for none, and joins sums across its ends.
    def to_attention(l, carry, s):
        dh, pools, grads, came = carry
        # What attention reads of what the layer kept is cut out of its stack here, beside products.
        dh, h, q, k, v, o, lse = lax.optimization_barrier((dh, s.h, s.q, s.k, s.v, s.o, s.lse))
        layer = layer_at(layers, l)
        more, dh, do = s.output_vjp.replace(args_res=[layer, h, o])(dh)
        grads = _add_at(grads, l, more, reads(lambda layer, h, o: layer.attention_output(h, o), layer, h, o))
        return *lax.optimization_barrier((dh, do, (q, k, v, o, lse))), pools, grads, came

    def from_attention(group, l, halfway, s, turn):
        dh, do, forward, pools, grads, came = halfway
        do, turn = lax.optimization_barrier((do, turn))
        here, ahead = here_and_ahead(pools, group, chunk, l, came, turn)
        adding = None if turn is None else turn.adding
        dq, own, pools = attention_vjp(pools, group, l, chunk, here, adding, forward, do)
        dk, dv = (gradient.astype(s.k.dtype) for gradient in own)
        dq, dk, dv, dh, h = lax.optimization_barrier((dq, dk, dv, dh, s.h))
        layer = layer_at(layers, l)
        more, more_dh = s.inputs_vjp.replace(args_res=[layer, h])((dq, dk, dv))
        grads = _add_at(grads, l, more, reads(lambda layer, h: layer.attention_inputs(h, chunk.positions), layer, h))
        dh = lax.optimization_barrier(dh + more_dh)
        if ahead is not None:
            # XLA begins a fetch five kernels before its end is asked for, here before those of attention; it would wait
            # for them if the end were that of the layer, and the link with it.
            k, dh = lax.optimization_barrier((ahead.k, dh))
            ahead = ahead._replace(k=k)
        return dh, pools, grads, ahead

    for group, wanted, saved in reversed(kept):
        first, turns, pools = downwards(pools, group, chunk, wanted)
        came = last if group is kept[-1].group else fetch(pools, group, first)
        carry, n = (dh, pools, grads, came), group.stop - group.start
        second = functools.partial(from_attention, group)
        carry = go_down(to_attention, second, jnp.int32(group.stop - 1), carry, saved, turns, n, pairs=group.staged)
        dh, pools, grads, _ = carry
    return dh, pools, grads


def _add_at(grads: Any, l: Int[Array, ""], more: Any, read: Any) -> Any:
    """The gradients of all layers with a part of one layer added, of the leaves that the part reads: the sums of others
    XLA would copy onto themselves."""

    def one(total, x, there):
        if not there:
            return total
        at_l = lax.dynamic_index_in_dim(total, l, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, at_l + x.astype(total.dtype), l, 0)

    return jax.tree.map(one, grads, more, read)


def _remat(config: Config):
    if config.remat == "none":
        return lambda f: f
    policies = jax.checkpoint_policies
    dots = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(PRODUCT)
    )
    # The forward and the backward pass are different loops, so there is nothing that common-subexpression elimination
    # could merge, and its barriers are not needed.
    return lambda f: jax.checkpoint(f, prevent_cse=False, policy=dots if config.remat == "dots" else None)
