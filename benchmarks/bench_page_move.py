"""Rate of the page movers between host memory and the device, alone and under matrix products.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/bench_page_move.py

Pages are random ones of a large pool in pinned host memory. A list of pages always has the same length and ends in -1,
as the lists of a training step do. Rates are bytes of the pool over time, in one direction: an addition moves as many
both ways. Under products the mover is on a stream of its own; `slowdown` is the time of both over the longer of the two
alone. What moved is checked first.

Writes the figures as JSON.
"""

import dataclasses
import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from oomb_jax.pallas_kernels.page_move import add_pages, fetch_pages, on_copy_stream, store_pages
from oomb_jax.shapes import iota

PRODUCT = 4096, 3584, 18944
"""The MLP of Qwen2.5-7B for a chunk of 4,096 tokens, up and down."""

CHECKED = 40
"""Pages that are compared before anything is timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Rate of the page movers."""

    pool_gib: float = 8
    """Size of the pool."""

    memory: Literal["pinned_host", "device"] = "pinned_host"
    """Where the pool lies."""

    pages: tuple[int, ...] = (64, 536, 2048)
    """Pages that a call moves. The largest is the length of every list."""

    under: int = 536
    """Pages that a call moves under matrix products."""

    products: int = 1
    """Pairs of products, up and down, that it moves them under."""

    programs: tuple[int, ...] = (8, 16, 32)
    """Programs of a mover."""

    layers: int = 4
    kv_heads: int = 4
    page: int = 128
    width: int = 128

    rounds: int = 3
    """Measurements; the median counts."""

    calls: int = 30
    """Calls in a measurement."""

    json: Path = Path("benchmarks/results/page-move.json")
    """Where the figures go."""


class Move(NamedTuple):
    """A mover and the dtypes that it moves between."""

    operation: str
    pool: str
    staged: str
    stochastic: bool = False


MOVES = (
    Move("fetch", "bfloat16", "bfloat16"),
    Move("store", "bfloat16", "bfloat16"),
    Move("add", "bfloat16", "float32"),
    Move("add", "bfloat16", "float32", stochastic=True),
    Move("fetch", "float32", "float32"),
    Move("add", "float32", "float32"),
    Move("fetch", "float8_e4m3fn", "bfloat16"),
    Move("store", "float8_e4m3fn", "float8_e4m3fn"),
)


def mover(move: Move, programs: int, scales) -> Callable[..., Any]:
    """pool, layer, pages, values -> pool, and what was fetched or None."""
    key = jax.random.key(0) if move.stochastic else None

    def run(pool, layer, pages, values):
        named = {"programs": programs}
        if move.operation == "fetch":
            wide = {} if move.pool == move.staged else {"scales": scales, "dtype": move.staged}
            return pool, on_copy_stream(fetch_pages)(pool, layer, pages, **named, **wide)
        if move.operation == "store":
            return on_copy_stream(store_pages)(pool, layer, pages, values, **named), None
        fresh = jnp.zeros(len(pages), bool)
        return on_copy_stream(add_pages)(pool, layer, pages, values, fresh, rounding_key=key, **named), None

    return run


def loop(settings: Settings, move: Callable[..., Any] | None, products: int, sharding):
    """`calls` times the mover and the products, whatever there is of both, one layer after the other."""

    def run(pool, pages, values, h, up, down):
        def body(carry, layer):
            pool, h, seen = carry
            fetched = None
            if move is not None:
                # A mover begins after the products before it, not while they run.
                pages_now, h = lax.optimization_barrier((pages, h))
                pool, fetched = move(pool, layer, pages_now, values)
            for _ in range(products):
                h = jnp.tanh(h @ up) @ down
            if fetched is not None:
                h, fetched = lax.optimization_barrier((h, fetched))
                seen = seen + fetched[0, 0, 0, 0].astype(jnp.float32)
            return (pool, h, seen), None

        # Layers come as inputs of the scan, as `on_copy_stream` says.
        return lax.scan(body, (pool, h, jnp.float32(0)), iota(settings.calls) % settings.layers)[0]

    return jax.jit(run, donate_argnums=0, out_shardings=(sharding, None, None))


def check(settings: Settings, move: Move, pool, sharding, scales):
    """Stores random pages and fetches, or adds to and fetches them; returns the pool."""
    rng = np.random.default_rng(0)
    U = max(settings.pages)
    pages = jnp.asarray(np.where(np.arange(U) < CHECKED, rng.permutation(pool.shape[1])[:U], -1), jnp.int32)
    shape = U, *pool.shape[2:]
    stored = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16).astype(move.pool)
    put = jax.jit(store_pages, donate_argnums=0, out_shardings=sharding)
    pool = put(pool, jnp.int32(1), pages, stored)
    expected = stored.astype(jnp.float32)
    if move.operation == "add":
        share = jax.random.normal(jax.random.key(2), shape, jnp.float32)
        add = jax.jit(mover(move, 16, scales), donate_argnums=0, out_shardings=(sharding, None))
        pool, _ = add(pool, jnp.int32(1), pages, share)
        expected = expected + share
    wide = {"scales": scales} if scales is not None else {}
    got = jax.jit(functools.partial(fetch_pages, **wide))(pool, jnp.int32(1), pages)
    # To nearest half a unit in the last place, stochastically a whole one.
    tolerance = 2.0**-7 if move.operation == "add" and move.pool == "bfloat16" else 0.0
    got, expected = (np.asarray(x[:CHECKED].astype(jnp.float32)) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=tolerance)
    return pool


def seconds(settings: Settings, run, pool, *arguments):
    """The pool, and the median time of a call."""
    times = []
    for _ in range(settings.rounds + 1):
        start = time.perf_counter()
        pool, *rest = run(pool, *arguments)
        jax.block_until_ready((pool, rest))
        times.append((time.perf_counter() - start) / settings.calls)
    return pool, statistics.median(times[1:])  # the first one compiles


def main(settings: Settings) -> None:
    """Measures, prints a table and writes the figures."""
    M, S, H = settings.kv_heads, settings.page, settings.width
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=settings.memory)
    rng, U = np.random.default_rng(1), max(settings.pages)
    C, D, F = PRODUCT
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * shape[0] ** -0.5
    products = draw(0, C, D), draw(1, D, F), draw(2, F, D)
    none = loop(settings, None, settings.products, None)
    _, alone = seconds(settings, none, jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.zeros(1), *products)
    print(f"{settings.products} pairs of products: {1e3 * alone:.3f} ms", flush=True)
    rows, pool = [], None
    for move in sorted(MOVES, key=lambda move: move.pool):
        dtype = jnp.dtype(move.pool)
        of_page = M * S * H * dtype.itemsize
        P = int(settings.pool_gib * 2**30) // (settings.layers * of_page)
        if pool is None or pool.dtype != dtype:
            del pool
            shape = settings.layers, P, M, S, H
            pool = jax.jit(functools.partial(lax.empty, shape, dtype), out_shardings=sharding)()
        scales = jnp.ones((settings.layers, P, M), jnp.float32) if dtype.itemsize == 1 else None
        pool = check(settings, move, pool, sharding, scales)
        values = jnp.ones((U, M, S, H), move.staged)
        for programs in settings.programs:
            run = loop(settings, mover(move, programs, scales), 0, sharding)
            row = move._asdict() | {"programs": programs}
            time_of = {}
            for n in sorted({*settings.pages, settings.under}):
                pages = jnp.asarray(np.where(np.arange(U) < n, rng.permutation(P)[:U], -1), jnp.int32)
                pool, time_of[n] = seconds(settings, run, pool, pages, values, *products)
                row[f"{n} pages GiB/s"] = round(n * of_page / time_of[n] / 2**30, 1)
            both = loop(settings, mover(move, programs, scales), settings.products, sharding)
            pages = jnp.asarray(np.where(np.arange(U) < settings.under, rng.permutation(P)[:U], -1), jnp.int32)
            pool, together = seconds(settings, both, pool, pages, values, *products)
            row |= {
                "alone ms": round(1e3 * time_of[settings.under], 3),
                "products ms": round(1e3 * alone, 3),
                "together ms": round(1e3 * together, 3),
                "slowdown": round(together / max(alone, time_of[settings.under]), 3),
            }
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": {key: str(value) for key, value in dataclasses.asdict(settings).items() if key != "json"},
        "moves": rows,
    }
    settings.json.parent.mkdir(parents=True, exist_ok=True)
    settings.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
