"""Batches as pure functions of (seed, step): no iterator, so nothing to save and nothing to restore.

The documents of a source form a ring: after the last comes the first. A *slice* is `ctx` ids of the ring from a random
place, whatever documents it meets. A *packed* row is `ctx` ids of whole documents in a random order, one an epoch.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int32, Int64

from oomb_jax.shapes import IGNORE
from oomb_jax.train.data.dataset import Documents, View

_EVALUATION_STEPS = np.array([0.7548776662466927, 0.5698402909980532])
"""1/g and 1/g² with g³ = g + 1: multiples of these, mod 1, fill the unit square evenly (Roberts' R2 sequence)."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows of one step."""

    tokens: Int32[np.ndarray, "B T"]
    """Ids."""

    labels: Int32[np.ndarray, "B T"]
    """The id that follows each token; -100 where nothing follows."""

    segments: Int32[np.ndarray, "B T"] | None
    """The number of each token's document in its row, from 0; None for slices."""


def sample(view: View, *, seed: int, step: int, batch: int, ctx: int, pack: bool = False, repeat: bool = True) -> Batch:
    """The rows of `step`. The same arguments give the same rows, whatever was sampled before.

    `pack=False`: each row is a slice from a uniformly random place; row r depends on (seed, step, r, ctx) alone.

    `pack=True`: row r is window step·batch + r of an endless stream of epochs, cut into windows of `ctx`. An epoch
    holds every document of the view once, in an order drawn from (seed, epoch); a document that does not fit goes on in
    the next window. Labels and segments end with the document. The end-of-document id occurs only as a label.

    With several sources each row is from one of them, drawn by weight; packed, each source has its own stream.

    A source of fewer than `ctx` ids is repeated within the row, which is said once; a ValueError if not `repeat`.
    """
    _check(view, ctx, batch, pack, repeat)
    for name, value in (("seed", seed), ("step", step)):
        if value < 0:
            raise ValueError(f"{name}={value}: not below 0")
    if not pack:
        rows = []
        for row in range(batch):
            rng = np.random.default_rng([seed, step, row])
            part = view.parts[_pick(view, rng.random())]
            rows.append(_slice(part, int(rng.integers(part.tokens)), ctx))
        return _stack(rows)
    first = step * batch
    # The sources of all rows so far: one draw a row (about 10 ns) spares us a cursor to save.
    draws = np.random.default_rng([seed, 0, 0, 2]).random(first + batch)
    picks = np.searchsorted(_edges(view), draws, side="right")
    rows = []
    for row in range(first, first + batch):
        window = np.count_nonzero(picks[:row] == picks[row])
        part = view.parts[picks[row]]
        epoch, offset = divmod(int(window) * ctx, _inputs(part))
        orders = (_order(part, seed, number) for number in itertools.count(epoch))
        rows.append(_packed(part, orders, offset, ctx))
    return _stack(rows)


def longest(view: View, *, pack: bool = False) -> int:
    """The largest `ctx` for which no row repeats any of its text."""
    return min(_inputs(part) if pack else part.tokens for part in view.parts)


def evaluation_batch(view: View, *, index: int, batch: int, ctx: int, pack: bool = False, repeat: bool = True) -> Batch:
    """Batch `index` of a fixed sequence that spreads evenly over the view, however few or many are taken; no seed.

    `pack` and `repeat` as in `sample`; a packed row begins with a document and keeps the order of the source.
    """
    _check(view, ctx, batch, pack, repeat)
    rows = []
    for row in range(index * batch, (index + 1) * batch):
        place, source = (0.5 + row * _EVALUATION_STEPS) % 1
        part = view.parts[_pick(view, source)]
        if pack:
            order = _order(part, None, 0)
            document = np.searchsorted(order.ends, int(place * _inputs(part)), side="right")
            offset = int(order.ends[document] - order.lengths[document])
            rows.append(_packed(part, itertools.repeat(order), offset, ctx))
        else:
            rows.append(_slice(part, int(place * part.tokens), ctx))
    return _stack(rows)


Row = tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"], Int32[np.ndarray, " T"] | None]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Order:
    """Documents laid end to end in some order."""

    starts: Int64[np.ndarray, " documents"]
    lengths: Int64[np.ndarray, " documents"]
    ends: Int64[np.ndarray, " documents"]


@functools.lru_cache(maxsize=8)
def _order(documents: Documents, seed: int | None, epoch: int) -> _Order:
    """One epoch, shuffled unless `seed` is None. The last id of a document is only a label, so each is one shorter."""
    starts, lengths = documents.starts, documents.lengths - 1
    order = np.flatnonzero(lengths)
    if seed is not None:
        order = np.random.default_rng([seed, epoch, 0, 1]).permutation(order)
    return _Order(starts=starts[order], lengths=lengths[order], ends=np.cumsum(lengths[order]))


def _inputs(documents: Documents) -> int:
    """Ids of an epoch."""
    return documents.tokens - len(documents.lengths)


def _slice(documents: Documents, offset: int, ctx: int) -> Row:
    ring = _Order(starts=documents.starts, lengths=documents.lengths, ends=documents.ends)
    ids = documents.take(_positions(*_window(itertools.repeat(ring), offset, ctx + 1)))
    tokens, labels = ids[:-1], ids[1:].copy()
    labels[documents.tokens - 1 - offset :: documents.tokens] = IGNORE  # where the ring closes
    return tokens, labels, None


def _packed(documents: Documents, orders: Iterator[_Order], offset: int, ctx: int) -> Row:
    starts, lengths = _window(orders, offset, ctx)
    positions = _positions(starts, lengths)
    segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return documents.take(positions), documents.take(positions + 1), segments


def _window(
    orders: Iterator[_Order], offset: int, count: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """Starts and lengths of the pieces of documents that make `count` ids from `offset` of the first order on."""
    starts, lengths = [], []
    for order in orders:
        stop = min(offset + count, int(order.ends[-1]))
        first = int(np.searchsorted(order.ends, offset, side="right"))
        last = int(np.searchsorted(order.ends, stop, side="left"))
        these, sizes = order.starts[first : last + 1].copy(), order.lengths[first : last + 1].copy()
        skipped = offset - (order.ends[first] - order.lengths[first])
        these[0] += skipped
        sizes[0] -= skipped
        sizes[-1] -= order.ends[last] - stop
        starts.append(these)
        lengths.append(sizes)
        count -= stop - offset
        offset = 0
        if count == 0:
            break
    return np.concatenate(starts), np.concatenate(lengths)


def _positions(starts: Int64[np.ndarray, " pieces"], lengths: Int64[np.ndarray, " pieces"]) -> Int64[np.ndarray, " T"]:
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])


def _edges(view: View) -> Float[np.ndarray, "_"]:
    return np.cumsum(view.weights)[:-1]


def _pick(view: View, number: float) -> int:
    return int(np.searchsorted(_edges(view), number, side="right"))


def _stack(rows: list[Row]) -> Batch:
    tokens, labels, segments = zip(*rows, strict=True)
    return Batch(
        tokens=np.stack(tokens),
        labels=np.stack(labels),
        segments=None if segments[0] is None else np.stack(segments),
    )


def _check(view: View, ctx: int, batch: int, pack: bool, repeat: bool) -> None:
    for name, value in (("ctx", ctx), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1")
    sizes = [_inputs(part) if pack else part.tokens for part in view.parts]
    for part, size in zip(view.parts, sizes, strict=True):
        if size < ctx and not repeat:
            raise ValueError(
                f"ctx={ctx:,}: longer than the {size:,} tokens of data={part.name!r}; take more text, or "
                f"ctx={min(sizes):,} at most"
            )
    if repeat:
        warn_of_repeats(view, ctx, pack=pack)


def warn_of_repeats(view: View, ctx: int, *, pack: bool = False) -> None:
    """Says, once for each, which sources a row of `ctx` ids repeats and how often."""
    for part in view.parts:
        size = _inputs(part) if pack else part.tokens
        if size < ctx:
            _say_repeated(part.name, size, ctx)


@functools.cache
def _say_repeated(name: str, tokens: int, ctx: int) -> None:
    _log.warning(
        "data=%r: its %s tokens are repeated to fill ctx=%s, %s times; text that repeats is easy to predict",
        *(name, f"{tokens:,}", f"{ctx:,}", f"{ctx / tokens:,.3g}"),
    )
