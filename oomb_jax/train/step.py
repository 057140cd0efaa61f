"""One training step as compiled pieces, a chunk or two each: a step of minutes can then report and be interrupted.

    begin      clear the gradient pools
    fill       one chunk of the fill pass, or where pages are fetched two, and of an odd number the last alone
    reverse    one chunk of the reverse pass
    evaluate   one chunk of a forward pass with its losses
    update     the optimizer

They are the pieces of `oomb_jax.value_and_grad` and do the same. All are compiled from shapes before anything is
allocated, so what the step needs is known before it is taken.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from oomb_jax.chunked import Carry, evaluate, fill, fill_chunks, reverse, start_filling
from oomb_jax.compiler import COMPILER_OPTIONS
from oomb_jax.config import Config
from oomb_jax.forward import together
from oomb_jax.parts import key_shape, zero_gradients
from oomb_jax.placement import missing_slots
from oomb_jax.pools import Pools, clear_gradients, pool_shapes
from oomb_jax.selection import statistics
from oomb_jax.sequence import Sequence, cut, loss_weight
from oomb_jax.shapes import accumulator
from oomb_jax.train.data import Batch
from oomb_jax.train.optimizer import Optimizer, OptimizerState

Report = Callable[[Literal["fill", "reverse", "evaluate"], int, int, int, float | None], None]
"""Called when a piece is computed: pass, chunks done, chunks of the pass, index of the sequence, and in the reverse
pass the chunk's share of the loss. What it raises ends the step; model and optimizer are then as before it."""

IN_FLIGHT = 2
"""Pieces sent to the device before the oldest is waited for: enough to keep it busy, few enough to stop soon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a step on the device."""

    weights: int
    gradients: int
    optimizer: int
    pools: int
    tokens: int
    temporaries: int
    """The most that any piece takes beside the above, as its compiler says."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The compiled pieces for one model, context and batch."""

    config: Config
    pieces: dict[str, Any]
    memory: Memory

    def gradients(
        self, model: Any, pools: Pools, batch: Batch, report: Report
    ) -> tuple[Float[np.ndarray, "B n"], Any, Pools]:
        """Each chunk's share of the mean loss, the gradient, and the pools.

        Raises:
          ValueError: after the fill pass, where the chosen pages take more room than `kv_grad_pages`.
        """
        sequences = len(batch.tokens)
        weight = self.pieces["weight"](batch.labels)
        grads = self.pieces["zero"]()
        losses = []
        for b in range(sequences):
            sequence = self._cut(batch, b)
            with _Window(report, b) as window:
                filling = self.pieces["begin"](pools)
                total, size = fill_chunks(sequence, self.config), together(pools, self.config)
                for c in range(0, total, size):
                    chunks = np.arange(c, min(c + size, total), dtype=np.int32)
                    piece = self.pieces["fill" if c + size <= total or not c else "fill_rest"]
                    filling, done = piece(model, filling, sequence, chunks)
                    window.add("fill", c + len(chunks), total, done)
                self._check_room(filling.pools)
                carry, shares = Carry(pools=filling.pools, grads=grads), []
                del filling  # what only the fill pass needs makes room for the reverse pass
                for c in reversed(range(sequence.chunks)):
                    carry, loss = self.pieces["reverse"](model, carry, sequence, weight, _index(c))
                    window.add("reverse", sequence.chunks - c, sequence.chunks, loss)
                    shares.append(loss)
                pools, grads = carry.pools, carry.grads
            losses.append(np.concatenate(jax.device_get(shares))[::-1])
        return np.stack(losses), grads, pools

    def selection(self, pools: Pools) -> dict[str, float]:
        """What the last sequence of a step chose: see `selection.statistics`. Empty where attention is dense."""
        if "selection" not in self.pieces:
            return {}
        told = self.pieces["selection"](pools.selection, pools.mass)
        return {name: float(value) for name, value in jax.device_get(told).items()}

    def update(self, model: Any, grads: Any, state: OptimizerState) -> tuple[Any, OptimizerState, dict[str, Array]]:
        """The optimizer's update; model and state are donated."""
        return self.pieces["update"](model, grads, state)

    def _check_room(self, pools: Pools) -> None:
        """Raises ValueError where the chosen pages need more room for gradients than there is."""
        if "missing" in self.pieces and (missing := int(self.pieces["missing"](pools))):
            room = self.config.kv_grad_pages
            assert room is not None
            raise ValueError(
                f"kv_grad_pages={room}: of the chosen pages {room + missing} in a layer hold gradients at once, as the "
                f"fill pass shows; use --kv-grad-pages {room + missing} or more, fewer --pages, or a shorter --ctx"
            )

    def _cut(self, batch: Batch, b: int) -> Sequence:
        segments = None if batch.segments is None else batch.segments[b]
        return self.pieces["cut"](batch.tokens[b], batch.labels[b], segments)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Held-out losses, with the keys and values in the pools of the training step."""

    config: Config

    @functools.cached_property
    def _chunk(self):
        @functools.partial(jax.jit, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
        def piece(model, filling, sequence, c):
            return evaluate(model, filling, sequence, self.config, c)

        return piece

    def losses(self, model: Any, pools: Pools, batch: Batch, report: Report) -> tuple[Float[np.ndarray, "B T"], Pools]:
        """The loss of every token, 0 where it has no label, and the pools."""
        rows = []
        for b, (tokens, labels) in enumerate(zip(batch.tokens, batch.labels, strict=True)):
            segments = None if batch.segments is None else batch.segments[b]
            sequence = jax.jit(cut, static_argnames="config")(tokens, labels, segments, self.config)
            parts, filling = [], start_filling(model, pools, sequence, self.config)
            with _Window(report, b) as window:
                for c in range(sequence.chunks):
                    filling, losses = self._chunk(model, filling, sequence, _index(c))
                    window.add("evaluate", c + 1, sequence.chunks, losses)
                    parts.append(losses)
            pools = filling.pools
            rows.append(np.concatenate([x.reshape(-1) for x in jax.device_get(parts)])[: len(tokens)])
        return np.stack(rows), pools


def compile_here(f: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The executable of a function, with the `jax.jit` of these options, for arguments of these shapes."""
    return jax.jit(f, compiler_options=COMPILER_OPTIONS, **options).lower(*arguments).compile()


def compile_step(
    model: Any,
    optimizer: Optimizer,
    config: Config,
    *,
    batch: int,
    ctx: int,
    packed: bool,
    compile: Callable[..., Any] = compile_here,
) -> tuple[Step, Any]:
    """Compiles the step for a model given by its shapes, by `compile` where it is not to run here.

    Returns:
      The step, and the shapes of the optimizer's state.
    """
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    state = shapes(jax.eval_shape(optimizer.init, model))
    pools = pool_shapes(model, ctx, config)
    grads = jax.eval_shape(lambda model: zero_gradients(model, config), model)
    row = jax.ShapeDtypeStruct((ctx,), jnp.int32)
    segments = row if packed else None
    sequence = jax.eval_shape(functools.partial(cut, config=config), row, row, segments)
    labels = jax.ShapeDtypeStruct((batch, ctx), jnp.int32)
    dtype = accumulator(key_shape(model).dtype)
    weight = jax.ShapeDtypeStruct((), dtype)
    chunk = jax.ShapeDtypeStruct((1,), jnp.int32)

    def begin(pools):
        return start_filling(model, clear_gradients(pools), sequence, config)

    def fill_some(model, filling, sequence, chunks):
        return fill(model, filling, sequence, config, chunks), chunks[-1]

    def reverse_one(model, carry, sequence, weight, c):
        return reverse(model, carry, sequence, weight, config, c)

    total, size = fill_chunks(sequence, config), together(pools, config)
    # Of a single chunk there may be nothing to fill; the piece is then compiled for the plan alone.
    chunks = jax.ShapeDtypeStruct((min(size, max(total, 1)),), jnp.int32)
    carry = Carry(pools=pools, grads=grads)
    filling = jax.eval_shape(begin, pools)._replace(pools=pools)
    pieces = {
        "weight": compile(functools.partial(loss_weight, dtype=dtype), labels),
        "cut": compile(functools.partial(cut, config=config), row, row, segments),
        "zero": compile(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)),
        # The old gradients are not read; kept all the same, their memory becomes that of the new ones.
        "begin": compile(begin, pools, donate_argnums=0, keep_unused=True),
        "fill": compile(fill_some, model, filling, sequence, chunks, donate_argnums=1),
        "reverse": compile(reverse_one, model, carry, sequence, weight, chunk, donate_argnums=1),
        # So with the old model and float32 masters.
        "update": compile(optimizer.update, model, grads, state, donate_argnums=(0, 2), keep_unused=True),
    }
    if total % size and total > size:
        rest = jax.ShapeDtypeStruct((total % size,), jnp.int32)
        pieces["fill_rest"] = compile(fill_some, model, filling, sequence, rest, donate_argnums=1)
    if jax.eval_shape(lambda pools: missing_slots(pools, sequence, config), pools) is not None:
        pieces["missing"] = compile(lambda pools: missing_slots(pools, sequence, config), pools)
    if pools.selection is not None:
        tell = functools.partial(statistics, page=config.page)
        pieces["selection"] = compile(tell, pools.selection, pools.mass)
    analyses = [p.memory_analysis() for p in pieces.values()]
    memory = Memory(
        weights=tree_bytes(model),
        gradients=tree_bytes(grads),
        optimizer=tree_bytes(state),
        pools=tree_bytes(pools),
        tokens=tree_bytes(sequence) + tree_bytes(labels),
        temporaries=max(a.temp_size_in_bytes for a in analyses if a is not None),
    )
    return Step(config=config, pieces=pieces, memory=memory), state


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class _Window:
    """The pieces in flight of one sequence; reports each when it is computed."""

    def __init__(self, report: Report, sequence: int):
        self._report = report
        self._sequence = sequence
        self._sent: collections.deque = collections.deque()

    def __enter__(self) -> "_Window":
        return self

    def __exit__(self, kind, *_) -> None:
        while self._sent and kind is None:
            self._settle()

    def add(self, name: str, done: int, total: int, marker: Array) -> None:
        self._sent.append((name, done, total, marker))
        while len(self._sent) > IN_FLIGHT:
            self._settle()

    def _settle(self) -> None:
        name, done, total, marker = self._sent.popleft()
        marker.block_until_ready()
        loss = float(marker[0]) if name == "reverse" else None
        self._report(name, done, total, self._sequence, loss)


def _index(c: int) -> np.ndarray:
    return np.array([c], np.int32)
