"""The product kernel beside cuBLAS: alone, and while pages come from host memory.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/bench_matmul.py

Alone: the products of a layer and their gradients, in turns; and whether the bits are cuBLAS's. Beside movers: a loop
whose rounds make two feed-forward blocks while as many pages come as a chunk of 4,096 tokens fetches. Random matrices;
`nn` is x @ w, `nt` the gradient of x, `tn` that of w.
"""

import dataclasses
import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

import oomb_jax
from oomb_jax.pallas_kernels.device import multiprocessors
from oomb_jax.pallas_kernels.matmul import mosaic
from oomb_jax.pallas_kernels.matmul.api import reference
from oomb_jax.pallas_kernels.page_move import fetch_pages, on_copy_stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The product kernel beside cuBLAS."""

    tokens: int = 4096
    """C, of a chunk."""

    width: int = 3584
    """D, of the residual stream."""

    inner: int = 18944
    """F, of the feed-forward block."""

    fetched: int = 640
    """Pages of keys, and as many of values, that come in a round."""

    movers: tuple[int, ...] = (4, 16)
    """Programs of a mover; the kernel leaves them as many multiprocessors."""

    rounds: int = 24
    """Of the loop."""

    calls: int = 25
    """In a turn."""

    json: Path = Path("benchmarks/results/matmul.json")
    """Where the figures go."""


def alone(settings: Settings) -> list[dict[str, Any]]:
    """Milliseconds of each product, by the kernel and by cuBLAS."""
    C, D, F = settings.tokens, settings.width, settings.inner
    records = []
    for name, inner, outer in (("gate, up", D, F), ("down", F, D), ("q, o", D, D)):
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        x, w, dy = draw(0, C, inner), draw(1, inner, outer), draw(2, C, outer)
        for kind, a, b, transposed in (
            ("nn", x, w, {}),
            ("nt", dy, w, {"transpose_b": True}),
            ("tn", x, dy, {"transpose_a": True}),
        ):
            programs = multiprocessors() - settings.movers[0]
            kernel = jax.jit(functools.partial(mosaic.product, programs=programs, **transposed))
            cublas = jax.jit(functools.partial(reference, **transposed), compiler_options=oomb_jax.COMPILER_OPTIONS)
            same = np.asarray(kernel(a, b)).tobytes() == np.asarray(cublas(a, b)).tobytes()
            times = {"kernel": [], "cublas": []}
            for _ in range(3):
                for contestant, f in ("kernel", kernel), ("cublas", cublas):
                    times[contestant].append(_seconds(lambda f=f, a=a, b=b: f(a, b), settings.calls))
            figures = {key: round(statistics.median(value) * 1e3, 4) for key, value in times.items()}
            tflops = 2 * C * inner * outer / figures["kernel"] / 1e9
            records.append(
                {"product": f"{name} {kind}", "milliseconds": figures, "tflops": round(tflops), "same": same}
            )
            print(records[-1], flush=True)
    return records


def beside(settings: Settings) -> list[dict[str, Any]]:
    """Milliseconds of a round of the loop, with and without a fetch in it."""
    C, D, F, n = settings.tokens, settings.width, settings.inner, settings.rounds
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    pool = jax.jit(lambda: lax.empty((2, 1024, 4, 128, 128), jnp.bfloat16), out_shardings=host)
    pools = pool(), pool()
    keys = jax.random.split(jax.random.key(0), n)
    pages = jnp.stack([jax.random.permutation(key, 1024)[: settings.fetched].astype(jnp.int32) for key in keys])
    draw = lambda *shape: jax.random.normal(jax.random.key(3), shape, jnp.bfloat16) * 0.02
    h, weights = draw(C, D), (draw(n, D, F), draw(n, D, F), draw(n, F, D))

    def loop(product, programs, h, pools, weights, pages):
        fetch = functools.partial(on_copy_stream(fetch_pages), programs=programs)

        def body(carry, x):
            h, pools, total = carry
            l, (gate, up, down), wanted = x
            for pool in pools:
                came = fetch(pool, l % 2, wanted) if programs else None
                h = lax.optimization_barrier(h)
                inner = jax.nn.silu(product(h, gate)) * product(h, up)
                h = product(inner, down).astype(jnp.bfloat16)
                if came is not None:
                    h, came = lax.optimization_barrier((h, came))
                    total += came[0, 0, :8, :8]
            return (h, pools, total), None

        zeros = jnp.zeros((8, 8), jnp.bfloat16)
        (h, _, total), _ = lax.scan(body, (h, pools, zeros), (jnp.arange(n, dtype=jnp.int32), weights, pages))
        return h, total

    records = []
    for movers in (0, *settings.movers):
        spared = multiprocessors() - (movers or settings.movers[0])
        products = {"cublas": reference, "kernel": functools.partial(mosaic.product, programs=spared)}
        for name, product in products.items():
            step = jax.jit(functools.partial(loop, product, movers), compiler_options=oomb_jax.COMPILER_OPTIONS)
            seconds = _seconds(lambda step=step: step(h, pools, weights, pages), 3) / n
            records.append({"products": name, "movers": movers, "milliseconds": round(seconds * 1e3, 3)})
            print(records[-1], flush=True)
    return records


def _seconds(call: Callable[[], Any], calls: int) -> float:
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready([call() for _ in range(calls)][-1])
    return (time.perf_counter() - start) / calls


def main(settings: Settings) -> None:
    """Measures and writes the figures."""
    device = jax.devices()[0].device_kind
    about = {"device": device, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    sizes = {key: getattr(settings, key) for key in ("tokens", "width", "inner", "fetched")}
    figures = about | sizes | {"alone": alone(settings), "beside movers": beside(settings)}
    settings.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
