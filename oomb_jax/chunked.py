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

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from oomb_jax.config import Config
from oomb_jax.loss import embed_gradient, head_gradient, head_losses
from oomb_jax.pallas_kernels.paged_attention import paged_attention, paged_attention_vjp
from oomb_jax.parts import add, join, key_shape, layer_at, layer_count, split, zero_gradients
from oomb_jax.pools import Pools, append, check_pools, clear_gradients, own_gradients
from oomb_jax.selection import TopK, attention_mass, select
from oomb_jax.sequence import Sequence, check_batch, cut, loss_weight, segments_ordered, top_k
from oomb_jax.shapes import (
    Hidden,
    Keys,
    Labels,
    Positions,
    Queries,
    Scalar,
    Segments,
    Tokens,
    Values,
    accumulator,
    iota,
)

SCORES: dict[str, Literal["reference", "mosaic"]] = {
    "reference": "reference",
    "mosaic": "mosaic",
    "triton": "reference",  # plain JAX, which runs on every GPU
}
"""How pages are scored where `config.implementation` names the attention."""

STOCHASTIC_CHUNKS = 64
"""Above so many chunks a gradient pool narrower than float32 rounds stochastically: to nearest, its sums stall once a
chunk's share falls below half a unit in the last place, 2**-9 of the sum in bfloat16."""


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
        traced, so that nobody could look at them before.
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
        pools = fill(model, clear_gradients(carry.pools), sequence, config, iota(fill_chunks(sequence, config)))
        carry = Carry(pools=pools, grads=carry.grads)
        carry, losses = reverse(model, carry, sequence, weight, config, iota(sequence.chunks)[::-1])
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
        return evaluate(model, pools, sequence, config, iota(sequence.chunks))

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


def fill(model: Any, pools: Pools, sequence: Sequence, config: Config, chunks: Int[Array, " c"]) -> Pools:
    """Writes the keys and values of the given chunks, in rising order, into the pools, and with Top-K attention the
    pages that they choose. Activations are dropped, and the last layer stops at its keys and values."""
    outer, layers = split(model)
    L = layer_count(layers)

    def one(pools, c):
        chunk = _Chunk.of(sequence, c, config)
        h, made = _layers_forward(layers, chunk, pools, outer.embed(sequence.tokens[c]), L - 1)
        q, k, v = layer_at(layers, L - 1).attention_inputs(h, chunk.positions)
        table = chunk.choose(pools, L - 1, q)
        k, v, tables, mass = _put(made, (k, v, table, chunk.mass(pools, jnp.int32(L - 1), table, q, k)), L - 1)
        pools = append(pools, chunk.first_page, k, v)
        if chunk.top_k is not None:
            pools = pools._replace(selection=_put(pools.selection, tables, c), mass=mass)
        return pools, None

    with jax.named_scope("fill"):
        return lax.scan(one, pools, chunks)[0]


def evaluate(
    model: Any, pools: Pools, sequence: Sequence, config: Config, chunks: Int[Array, " c"]
) -> tuple[Pools, Float[Array, "c C"]]:
    """Fills the pools with the given chunks, in rising order, and returns the losses of their tokens."""
    outer, layers = split(model)

    def one(pools, c):
        chunk = _Chunk.of(sequence, c, config)
        h, (k, v, *_) = _layers_forward(layers, chunk, pools, outer.embed(sequence.tokens[c]), layer_count(layers))
        return append(pools, chunk.first_page, k, v), head_losses(outer, h, sequence.labels[c])

    return lax.scan(one, pools, chunks)


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
        chunk = _Chunk.of(sequence, c, config)
        outer_grads, layer_grads = split(carry.grads)
        with jax.named_scope("recompute"):
            h, saved = _layers_recompute(layers, chunk, carry.pools, outer.embed(sequence.tokens[c]))
        with jax.named_scope("head"):
            loss, dh, outer_grads = head_gradient(outer, outer_grads, h, sequence.labels[c], weight)
        with jax.named_scope("backward"):
            dh, pools, layer_grads = _layers_backward(layers, chunk, carry.pools, dh, saved, layer_grads)
            outer_grads = embed_gradient(outer, outer_grads, sequence.tokens[c], dh)
        return Carry(pools=pools, grads=join(outer_grads, layer_grads)), loss

    return lax.scan(one, carry, chunks)


class _Chunk(NamedTuple):
    """Where a chunk stands, and what it attends to."""

    config: Config
    top_k: TopK | None
    """None where all earlier pages are attended to."""
    number: Int[Array, ""]
    first_page: Int[Array, ""]
    pages: int
    """Of the sequence."""
    length: int
    """C, tokens."""
    tokens: Int[Array, ""]
    """Those that are no padding."""
    positions: Positions
    last: Bool[Array, ""]
    """Whether it is the last of the sequence."""
    rounding: jax.Array | None
    segments: dict[str, Any]

    @classmethod
    def of(cls, sequence: Sequence, c, config: Config) -> "_Chunk":
        C, T = sequence.chunk, sequence.chunks * sequence.chunk
        segments = {}
        if sequence.segments is not None:
            by_page = sequence.segments.reshape(-1, config.page)
            segments = {"q_segments": sequence.segments[c], "pool_segments": by_page}
        return cls(
            config=config,
            top_k=top_k(T, config),
            number=c,
            first_page=c * (C // config.page),
            pages=T // config.page,
            length=C,
            tokens=jnp.clip(sequence.length - c * C, 0, C),
            positions=sequence.positions(c),
            last=c == sequence.chunks - 1,
            rounding=jax.random.fold_in(jax.random.key(0), c) if sequence.chunks > STOCHASTIC_CHUNKS else None,
            segments=segments,
        )

    def choose(self, pools: Pools, l, q: Queries) -> Int[Array, "R *M K"]:
        """The pages that the queries of layer l attend to: a row for each query page, or one for all."""
        if self.top_k is None:
            return self._all_pages()
        assert pools.representatives is not None  # check_pools
        return select(
            self.top_k,
            q,
            pools.representatives[l, : self.pages],
            self.first_page,
            page=self.config.page,
            tokens=self.tokens,
            implementation=None if self.config.implementation is None else SCORES[self.config.implementation],
            **self.segments,
        )

    def chosen(self, pools: Pools, l) -> Int[Array, "R *M K"]:
        """What `choose` returned in the fill pass."""
        if self.top_k is None:
            return self._all_pages()
        assert pools.selection is not None  # check_pools
        return pools.selection[self.number, l]

    def mass(self, pools: Pools, l, table, q: Queries, k: Keys) -> Float[Array, "2"] | None:
        """See `Pools.mass`; of the first and the middle query page of the last chunk, and 0 of others."""
        if self.top_k is None or pools.mass is None:
            return None
        dtype, sample = pools.mass.dtype, iota(2) * (table.shape[0] // 2)
        measure = lambda: jnp.stack(attention_mass(q, k, pools.k, l, self.first_page, table, sample, **self.segments))
        return lax.cond(self.last, measure, lambda: jnp.zeros(2, dtype))

    def _all_pages(self) -> Int[Array, "1 K"]:
        ids = iota(self.pages)
        return jnp.where(ids < self.first_page, ids, -1)[None]

    def attention(self, pools: Pools, l, table, q: Queries, k: Keys, v: Values):
        """out and lse."""
        implementation = self.config.implementation
        return paged_attention(q, k, v, pools.k, pools.v, l, table, implementation=implementation, **self.segments)

    def attention_vjp(self, pools: Pools, l, table, q: Queries, k: Keys, v: Values, o: Queries, lse, do: Queries):
        """(dq, dk, dv) of the chunk, complete with what later chunks left in the pools, and the pools."""
        dq, dk, dv, dk_pool, dv_pool = paged_attention_vjp(
            *(q, k, v, pools.k, pools.v, pools.dk, pools.dv, l, table, o, lse, do),
            rounding_key=None if self.rounding is None else jax.random.fold_in(self.rounding, l),
            implementation=self.config.implementation,
            **self.segments,
        )
        pools = pools._replace(dk=dk_pool, dv=dv_pool)
        # Read from the updated pools: a read of the old ones after the update would make XLA keep a copy of them.
        later_dk, later_dv = own_gradients(pools, l, self.first_page, self.length // self.config.page)
        total = lambda own, later: (own + later.astype(own.dtype)).astype(k.dtype)
        return (dq, total(dk, later_dk), total(dv, later_dv)), pools


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


def _layers_forward(layers: Any, chunk: _Chunk, pools: Pools, h: Hidden, L: int):
    """The first L layers: their result, and of all layers keys and values [layers, C, M, H], chosen pages and their
    mass, those of further layers 0."""

    def inputs(h, l):
        q, k, v = layer_at(layers, l).attention_inputs(h, chunk.positions)
        table = chunk.choose(pools, l, q)
        return q, (k, v, table, chunk.mass(pools, l, table, q, k))

    def body(l, carry):
        h, made = carry
        q, more = inputs(h, l)
        k, v, table, _ = more
        o, _ = chunk.attention(pools, l, table, q, k, v)
        return layer_at(layers, l).attention_output(h, o), _put(made, more, l)

    shapes = jax.eval_shape(lambda h: inputs(h, jnp.int32(0))[1], h)
    empty = jax.tree.map(lambda x: jnp.zeros((layer_count(layers), *x.shape), x.dtype), shapes)
    # A loop over an index: a scan over the first L layers would copy their weights.
    return lax.fori_loop(0, L, body, (h, empty))


def _layers_recompute(layers: Any, chunk: _Chunk, pools: Pools, h: Hidden) -> tuple[Hidden, _Saved]:
    """All layers again, keeping for the backward pass what `config.remat` says."""
    remat = _remat(chunk.config)

    def body(h, x):
        l, layer = x
        inputs = remat(lambda layer, h: layer.attention_inputs(h, chunk.positions))
        (q, k, v), inputs_vjp = jax.vjp(inputs, layer, h, saveable_args=False)
        o, lse = chunk.attention(pools, l, chunk.chosen(pools, l), q, k, v)
        output = remat(lambda layer, h, o: layer.attention_output(h, o))
        result, output_vjp = jax.vjp(output, layer, h, o, saveable_args=False)
        # Without the barrier XLA fuses a kernel with the write of its result into the stack, and where that result has
        # another use runs the kernel a second time for it.
        return result, lax.optimization_barrier(_Saved(h, inputs_vjp, q, k, v, o, lse, output_vjp))

    return lax.scan(body, h, (iota(layer_count(layers)), layers))


def _layers_backward(layers: Any, chunk: _Chunk, pools: Pools, dh: Hidden, saved: _Saved, grads: Any):
    """Back through all layers: the gradient of the chunk's embeddings, the pools, the layers' gradients."""

    def body(carry, x):
        dh, pools, grads = carry
        l, layer, s = x
        d_output, dh, do = s.output_vjp.replace(args_res=[layer, s.h, s.o])(dh)
        d_qkv, pools = chunk.attention_vjp(pools, l, chunk.chosen(pools, l), s.q, s.k, s.v, s.o, s.lse, do)
        d_inputs, more_dh = s.inputs_vjp.replace(args_res=[layer, s.h])(d_qkv)
        total = add(add(layer_at(grads, l), d_output), d_inputs)
        return (dh + more_dh, pools, _put(grads, total, l)), None

    xs = (iota(layer_count(layers)), layers, saved)
    return lax.scan(body, (dh, pools, grads), xs, reverse=True)[0]


def _put(stack: Any, layer: Any, l: Int[Array, ""] | int) -> Any:
    """The stack with one layer replaced."""
    return jax.tree.map(lambda all_layers, x: lax.dynamic_update_index_in_dim(all_layers, x, l, 0), stack, layer)


def _remat(config: Config):
    if config.remat == "none":
        return lambda f: f
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    # The forward and the backward pass are different loops, so there is nothing that common-subexpression elimination
    # could merge, and its barriers are not needed.
    return lambda f: jax.checkpoint(f, prevent_cse=False, policy=dots if config.remat == "dots" else None)
