"""Where the time of a traced step went: by phase and kind of kernel, and against the same matrix products alone."""

import collections
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from oomb_jax.config import Config
from oomb_jax.models.qwen2 import ModelConfig
from oomb_jax.pallas_kernels.linear_cross_entropy.api import TILE_LOGITS
from oomb_jax.sequence import chunk_count, chunk_length
from oomb_jax.shapes import divisor

PHASES = "fill", "recompute", "head", "backward"
KINDS = {
    "attention": re.compile(r"paged_attention|cudnn.*sdpa|flash|fmha"),
    "matmul": re.compile(r"nvjet|gemm|cutlass|xmma|cublas"),
}


def breakdown(trace: Path, seconds: float, sizes: ModelConfig, context: int, config: Config) -> dict[str, Any]:
    """Milliseconds of kernels by phase and kind, the share of the step that they account for, and what the matrix
    products of the layers would take alone."""
    phases = {phase: collections.defaultdict(float) for phase in (*PHASES, "other")}
    phase, total = "other", 0.0
    for start, milliseconds, name, scope in sorted(_kernels(trace)):
        del start
        found = [part for part in scope.split("/") if part in PHASES]
        # A kernel that lost its scope belongs to the one before it.
        phase = found[0] if found else phase if not scope else "other"
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")
        phases[phase][kind] += milliseconds
        total += milliseconds
    alone = matmul_milliseconds(sizes, context, config)
    inside = sum(phase["matmul"] for phase in phases.values())
    return {
        "seconds": round(seconds, 3),
        "phases": {name: {k: round(v, 1) for k, v in kinds.items()} for name, kinds in phases.items()},
        "accounted": round(total / 1e3 / seconds, 4),
        "matmul_alone_over_step": round(sum(alone.values()) / inside, 3),
        "matmul_alone_milliseconds": {name: round(value, 1) for name, value in alone.items()},
    }


def _kernels(trace: Path) -> list[tuple[float, float, str, str]]:
    """Start, milliseconds, name and scope of every kernel on the device's busiest stream."""
    newest = max(trace.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    data = jax.profiler.ProfileData.from_file(str(newest))
    streams = []
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            kernels = []
            for event in line.events:
                scope = str(dict(event.stats).get("name", ""))
                kernels.append((event.start_ns, event.duration_ns / 1e6, event.name, scope))
            streams.append(kernels)
    if not streams:
        raise NotImplementedError(f"{newest}: no kernels of a GPU; --profile needs one")
    return max(streams, key=lambda kernels: sum(kernel[1] for kernel in kernels))


def matmul_milliseconds(sizes: ModelConfig, context: int, config: Config) -> dict[str, float]:
    """Time that the matrix products of one step take alone, by their shape."""
    C, n, L = chunk_length(context, config), chunk_count(context, config), sizes.num_hidden_layers
    D, F, V = sizes.hidden_size, sizes.intermediate_size, sizes.vocab_size
    width = sizes.num_attention_heads * sizes.head_dim
    kv = sizes.num_key_value_heads * sizes.head_dim
    forward = (n - 1) * (L - 1) + n * L * (2 if config.remat == "full" else 1)
    rows = divisor(C, max(1, TILE_LOGITS // V))
    # Name: rows, inner, columns, times forward, times backward (twice each: inputs and weights).
    products = {
        "qkv": (C, D, width + 2 * kv, forward, n * L),
        "o": (C, width, D, forward, n * L),
        "gate, up": (C, D, F, 2 * forward, 2 * n * L),
        "down": (C, F, D, forward, n * L),
        "head": (rows, D, V, n * C // rows, n * C // rows),
    }
    times = {}
    for name, (R, inner, columns, ahead, back) in products.items():
        shapes = (R, inner), (inner, columns), (R, columns)
        # Random: a chip at its power limit multiplies ones faster.
        x, w, y = (jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) for shape in shapes)
        times[name] = ahead * _time(lambda x, w: x @ w, x, w)
        times[name] += back * _time(lambda y, w: y @ w.T, y, w)
        times[name] += back * _time(lambda x, y: x.T @ y, x, y)
    return times


def _time(function: Any, *arguments: Any, calls: int = 20) -> float:
    """Milliseconds of one call, the median of five rounds, after calls that do not count."""
    function = jax.jit(function)
    rounds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)][-1])
        rounds.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(rounds[1:])
