"""Where the time of a traced step went: by phase and kind of kernel, against the same matrix products alone, and how
much of the page movers' time is hidden under it.

    python benchmarks/step_profile.py runs/trace        # the movers of a trace that `bench_step.py --profile` left
"""

import bisect
import collections
import json
import re
import statistics
import sys
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
    "matmul": re.compile(r"nvjet|gemm|cutlass|xmma|cublas|^matmul"),
    # XLA forgets for whom it sorts; besides the choice only the embedding's gradient has it sort, once a chunk.
    "selection": re.compile(r"page_scores|^sort_"),
}
SCOPES = {"selection": re.compile(r"\b(selection|slots)\b"), "recall": re.compile(r"\brecall\b")}
"""What else belongs to a kind: scopes that the code names."""
LISTED = 60
"""Kernels that a profile names."""
MOVER = re.compile(r"_(fetch|fetch_wider|store|add)$")

Kernel = tuple[float, float, str, str]
"""Start (ns), milliseconds, name and scope."""


def breakdown(trace: Path, seconds: float, sizes: ModelConfig, context: int, config: Config) -> dict[str, Any]:
    """Milliseconds of kernels by phase and kind, the share of the step that they account for, what the matrix products
    of the layers would take alone, and the page movers."""
    streams = _streams(trace)
    phases = {phase: collections.defaultdict(float) for phase in (*PHASES, "other")}
    phase, total = "other", 0.0
    for start, milliseconds, name, scope in sorted(_busiest(streams)):
        del start
        found = _phases(scope)
        # A kernel that lost its scope belongs to the one before it.
        phase = found[0] if found else phase if not scope else "other"
        phases[phase][_kind(name, scope)] += milliseconds
        total += milliseconds
    alone = matmul_milliseconds(sizes, context, config)
    inside = sum(phase["matmul"] for phase in phases.values())
    return {
        "seconds": round(seconds, 3),
        "phases": {name: {k: round(v, 1) for k, v in kinds.items()} for name, kinds in phases.items()},
        "accounted": round(total / 1e3 / seconds, 4),
        "matmul_alone_over_step": round(sum(alone.values()) / inside, 3),
        "matmul_alone_milliseconds": {name: round(value, 1) for name, value in alone.items()},
        "movers": movers(streams),
        "kernels": kernels(_busiest(streams)),
    }


def kernels(stream: list[Kernel]) -> list[dict[str, Any]]:
    """Those of a stream that take longest: their kind, name, the end of their scope, how many, and milliseconds."""
    sums: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for _, milliseconds, name, scope in stream:
        told = sums[name, scope]
        told[0] += 1
        told[1] += milliseconds
    longest = sorted(sums.items(), key=lambda item: -item[1][1])[:LISTED]
    return [
        {"kind": _kind(*key), "name": key[0][:80], "scope": key[1][-80:], "number": n, "milliseconds": round(ms, 1)}
        for key, (n, ms) in longest
    ]


def movers(streams: list[list[Kernel]]) -> dict[str, dict[str, float]]:
    """By phase and page mover: its milliseconds, and the share of them in which the busiest stream computes."""
    # Where that stream runs; kernels less than 2 us apart count as one stretch.
    stretches: list[list[float]] = []
    for start, milliseconds, _, _ in sorted(_busiest(streams)):
        end = start + milliseconds * 1e6
        if stretches and start <= stretches[-1][1] + 2e3:
            stretches[-1][1] = max(stretches[-1][1], end)
        else:
            stretches.append([start, end])
    starts = [start for start, _ in stretches]
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for stream in streams:
        for start, milliseconds, name, scope in stream:
            if not MOVER.match(name):
                continue
            end, i = start + milliseconds * 1e6, max(0, bisect.bisect_right(starts, start) - 1)
            told = sums[" ".join([*_phases(scope)[:1], name.removeprefix("_")])]
            told[0] += milliseconds
            while i < len(stretches) and stretches[i][0] < end:
                told[1] += max(0.0, min(end, stretches[i][1]) - max(start, stretches[i][0])) / 1e6
                i += 1
    return {
        name: {"milliseconds": round(all_of_it, 1), "hidden": round(hidden / all_of_it, 3)}
        for name, (all_of_it, hidden) in sorted(sums.items())
    }


def _kind(name: str, scope: str) -> str:
    found = [kind for kind, pattern in KINDS.items() if pattern.search(name)]
    found += [kind for kind, pattern in SCOPES.items() if pattern.search(scope)]
    return found[0] if found else "other"


def _phases(scope: str) -> list[str]:
    return [part for part in scope.split("/") if part in PHASES]


def _busiest(streams: list[list[Kernel]]) -> list[Kernel]:
    return max(streams, key=lambda kernels: sum(kernel[1] for kernel in kernels))


def _streams(trace: Path) -> list[list[Kernel]]:
    """The kernels of every stream of the device, from the newest trace in a directory."""
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
    return streams


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


if __name__ == "__main__":
    print(json.dumps(movers(_streams(Path(sys.argv[1]))), indent=2))
