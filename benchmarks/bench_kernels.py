"""Rate of the paged attention kernels beside cuDNN's attention on contiguous data, in turns in one run.

    XLA_FLAGS=--xla_gpu_enable_command_buffer= python benchmarks/bench_kernels.py

The problems: one row of random pages for all queries (dense), the same number of keys with the chunk among them, and
Top-K, where every query page has a row of random pages, or the same row, or one for each key/value head, or what a
model with random weights chooses. All have the chunk's own keys, causally; every pair of a query and a key that it sees
counts, two matrix products forward and five backward. cuDNN's backward is its forward and backward less its forward.
Errors are relative, against float32 on the host: of the last query page and the first key/value head, and for keys of
one page.

Then what a chunk of one layer waits for before Top-K attention: the scores of all pages, and with them the choice and
its slots, in a loop on the device.

Writes the figures as JSON.
"""

import dataclasses
import datetime
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

import oomb_jax
from oomb_jax.pallas_kernels.page_score import page_scores
from oomb_jax.pallas_kernels.paged_attention import paged_attention, paged_attention_vjp
from oomb_jax.selection import TopK, select, stage

MATMUL = 8192
"""Side of the matrix product that stands for the chip's peak."""

MODEL, MODEL_LAYERS = "qwen2.5-7b", 4
"""What chooses pages as a model does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Rate of the paged attention kernels beside cuDNN's."""

    implementation: Literal["mosaic", "triton"] = "mosaic"

    queries: int = 4096
    """Tokens of the chunk."""

    keys: int = 32768
    """Keys of the dense problems and of cuDNN."""

    top_k: int = 64
    """Pages of a query page in the Top-K problem."""

    pool: int = 8192
    """Pages in the pool."""

    scored: tuple[int, ...] = (16384, 32768)
    """Pages to choose from where the choice is measured."""

    only: tuple[str, ...] = ()
    """Names of the problems to run, such as "top-k, the same pages"; all where there are none."""

    heads: int = 28
    kv_heads: int = 4
    width: int = 128
    page: int = 128

    rounds: int = 5
    """Turns of every contestant; the median counts."""

    calls: int = 40
    """Calls in a turn that count, after as many that do not."""

    json: Path = Path("benchmarks/results/kernels.json")
    """Where the figures go."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Arguments of one forward and backward pass, and their results."""

    forward: tuple[Any, ...]
    """q, k_new, v_new, k_pool, v_pool, layer, table."""
    d_out: Any
    results: tuple[Any, ...]
    """out, lse, dq, and the gradient of the keys of the last row's first page, first head."""
    turns: dict[str, Callable[[], Any]]
    """One call, forward and backward."""


def tables(settings: Settings) -> dict[str, np.ndarray]:
    """By problem, the table: [R, K], or [R, M, K]. Pages are in random order."""
    rng = np.random.default_rng(0)

    def draw(*lists, pages):
        each = [rng.choice(settings.pool, pages, replace=False) for _ in range(math.prod(lists))]
        return np.stack(each).reshape(*lists, pages).astype(np.int32)

    C, S, K = settings.queries, settings.page, settings.top_k
    result = {
        "dense": draw(1, pages=settings.keys // S),
        "dense with chunk": draw(1, pages=(settings.keys - C) // S),
        "top-k": draw(C // S, pages=K),
        "top-k, the same pages": np.repeat(draw(1, pages=K), C // S, axis=0),
        "top-k, lists of heads": draw(C // S, settings.kv_heads, pages=K),
    }
    name = "top-k, the model's pages"
    return result | ({name: chosen(settings)} if not settings.only or name in settings.only else {})


def chosen(settings: Settings) -> np.ndarray:
    """What the last chunk of random tokens, as many as the pool has, chooses in the last of a few random layers."""
    sizes = dataclasses.replace(oomb_jax.models.config(MODEL), num_hidden_layers=MODEL_LAYERS)
    model = oomb_jax.models.create(sizes, key=jax.random.key(0))
    tokens = settings.pool * settings.page
    config = oomb_jax.Config(attention=TopK(pages=settings.top_k), chunk=settings.queries, page=settings.page)
    ids = jax.random.randint(jax.random.key(1), (tokens,), 0, sizes.vocab_size)
    losses = functools.partial(oomb_jax.token_losses, config=config)
    run = jax.jit(losses, donate_argnums=1, compiler_options=oomb_jax.COMPILER_OPTIONS)
    _, pools = run(model, oomb_jax.create_pools(model, tokens, config), ids, ids)
    assert pools.selection is not None
    return np.asarray(pools.selection[-1, -1])


def problem(settings: Settings, table: np.ndarray, seed: int) -> Problem:
    """Random inputs, one layer of pools, and the kernels compiled."""
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    C, M, S, H = settings.queries, settings.kv_heads, settings.page, settings.width
    q, d_out = (draw(next(keys), (C, settings.heads, H)) for _ in range(2))
    k_new, v_new = (draw(next(keys), (C, M, H)) for _ in range(2))
    k_pool, v_pool = (draw(next(keys), (1, settings.pool, M, S, H)) for _ in range(2))
    arguments = q, k_new, v_new, k_pool, v_pool, jnp.int32(0), jnp.asarray(table)

    named = {"implementation": settings.implementation}
    forward = functools.partial(jax.jit(functools.partial(paged_attention, **named)), *arguments)
    backward = jax.jit(functools.partial(paged_attention_vjp, **named), donate_argnums=(5, 6))
    out, lse = forward()
    step = lambda pools: backward(*arguments[:5], *pools, *arguments[5:], out, lse, d_out)
    zeros = lambda: [jnp.zeros(k_pool.shape, jnp.float32) for _ in range(2)]
    dq, _, _, dk_pool, _ = step(zeros())
    results = out, lse, dq, dk_pool[0, table[-1].flat[0], 0]
    del dk_pool
    pools = zeros()

    def turn():
        pools[:] = step(pools)[3:]
        return pools

    return Problem(forward=arguments, d_out=d_out, results=results, turns={"forward": forward, "backward": turn})


def errors(p: Problem) -> dict[str, float]:
    """Relative errors of out, dq and dk; see the module's docstring."""
    f32 = lambda x: np.asarray(x).astype(np.float32)
    q, k_new, v_new, k_pool, v_pool, _, table = p.forward
    out, lse, dq, dk = p.results
    (C, N, H), R, S = q.shape, table.shape[0], k_pool.shape[3]
    G = N // k_new.shape[1]
    q, d_out, out, dq = (f32(x[:, :G]).swapaxes(0, 1) for x in (q, p.d_out, out, dq))
    delta = np.sum(out * d_out, axis=-1)
    table = np.asarray(table).reshape(R, -1, table.shape[-1])[:, 0]  # the first head's

    last = slice(C - S, C)
    whole = lambda pool, own: np.concatenate([f32(pool[0, table[-1], 0]).reshape(-1, H), f32(own[:, 0])])
    k, v = whole(k_pool, k_new), whole(v_pool, v_new)
    scores = q[:, last] @ k.T / np.sqrt(H)
    scores[:, :, -C:][:, np.arange(C - S, C)[:, None] < np.arange(C)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    exact_out = weights @ v
    exact_delta = np.sum(exact_out * d_out[:, last], axis=-1, keepdims=True)
    exact_dq = weights * (d_out[:, last] @ v.T - exact_delta) @ k / np.sqrt(H)

    page = table[-1, 0]
    of_page = np.repeat((table == page).any(axis=1), C // R)
    q, d_out, delta, lse = q[:, of_page], d_out[:, of_page], delta[:, of_page], f32(lse)[:G, of_page]
    k, v = f32(k_pool[0, page, 0]), f32(v_pool[0, page, 0])
    weights = np.exp(q @ k.T / np.sqrt(H) - lse[..., None])
    d_scores = weights * (d_out @ v.T - delta[..., None])
    exact_dk = np.einsum("gqs,gqh->sh", d_scores, q) / np.sqrt(H)

    relative = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return {
        "out": relative(out[:, last], exact_out),
        "dq": relative(dq[:, last], exact_dq),
        "dk": relative(f32(dk), exact_dk),
    }


def yardsticks(settings: Settings) -> dict[str, Callable[[], Any]]:
    """One call of cuDNN's attention, forward and both ways, and of a large matrix product."""
    draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    keys = iter(jax.random.split(jax.random.key(9), 6))
    query_shape = 1, settings.queries, settings.heads, settings.width
    key_shape = 1, settings.keys, settings.kv_heads, settings.width
    q, d_out = (draw(next(keys), query_shape) for _ in range(2))
    k, v = (draw(next(keys), key_shape) for _ in range(2))
    a, b = (draw(next(keys), (MATMUL, MATMUL)) for _ in range(2))
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    both = lambda q, k, v, d_out: jax.vjp(attention, q, k, v)[1](d_out)
    return {
        "cudnn forward": functools.partial(jax.jit(attention), q, k, v),
        "cudnn both": functools.partial(jax.jit(both), q, k, v, d_out),
        "matmul": functools.partial(jax.jit(jnp.matmul), a, b),
    }


def seconds(turns: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Median time of a call. The contestants take turns, so that a warmer chip is warmer for all.

    A chip at its power limit takes a while to find the clock that a program allows, so a turn begins with as many calls
    that do not count: else who follows the matrix product would pay for it.
    """
    times = {name: [] for name in turns}

    def run(call):
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()
        jax.block_until_ready(call())
        return (time.perf_counter() - start) / calls

    for _ in range(rounds):
        for name, call in turns.items():
            run(call)
            times[name].append(run(call))
    return {name: statistics.median(values) for name, values in times.items()}


def choice(settings: Settings, P: int) -> dict[str, float]:
    """Milliseconds of one chunk and layer, of P pages and whatever implementation nobody named."""
    C, M, S = settings.queries, settings.kv_heads, settings.page
    keys = jax.random.split(jax.random.key(P))
    q = jax.random.normal(keys[0], (C, settings.heads, settings.width), jnp.bfloat16)
    representatives = jax.random.normal(keys[1], (P, M, settings.width), jnp.bfloat16) * S**-0.5
    start, votes, first_page = jnp.zeros(C // S, jnp.int32), jnp.ones(C, bool), jnp.int32(P - C // S)

    def choose(scope, q, representatives, first_page):
        table = select(TopK(pages=settings.top_k, scope=scope), q, representatives, first_page, page=S)
        return table, stage(table, P)

    def milliseconds(function):
        def loop(*arguments):
            def body(_, results):
                # Each turn has to wait for the last and cannot be taken out of the loop.
                return function(*lax.optimization_barrier((arguments, results))[0])

            return lax.fori_loop(1, settings.calls, body, function(*arguments))

        turn = functools.partial(jax.jit(loop), q, representatives, first_page)
        return 1e3 * seconds({"": turn}, settings.rounds, 2)[""] / settings.calls

    return {
        "scores ms": milliseconds(lambda q, r, first_page: page_scores(q, r, start, first_page, votes)),
        "choice ms": milliseconds(functools.partial(choose, "all_heads")),
        "choice by head ms": milliseconds(functools.partial(choose, "kv_head")),
    }


def measure(settings: Settings, table: np.ndarray, seed: int) -> dict[str, Any]:
    """Rates and errors of one problem."""
    C, S, pages = settings.queries, settings.page, table.shape[-1]
    product = 2 * settings.heads * settings.width
    p = problem(settings, table, seed)
    found = errors(p)
    times = seconds(yardsticks(settings) | p.turns, settings.rounds, settings.calls)
    contiguous, pairs = C * settings.keys * product, (C * pages * S + C * (C + 1) // 2) * product
    rate = {
        "matmul": 2 * MATMUL**3 / times["matmul"],
        "cudnn forward": 2 * contiguous / times["cudnn forward"],
        "cudnn backward": 5 * contiguous / (times["cudnn both"] - times["cudnn forward"]),
        "forward": 2 * pairs / times["forward"],
        "backward": 5 * pairs / times["backward"],
    }
    return (
        {"rows": len(table), "pages": pages, "distinct pages": len(np.unique(table))}
        | {f"{key} TFLOP/s": round(value / 1e12, 1) for key, value in rate.items()}
        | {f"{way} share of matmul": round(rate[way] / rate["matmul"], 3) for way in ("forward", "backward")}
        | {f"{way} x cudnn": round(rate[way] / rate[f"cudnn {way}"], 3) for way in ("forward", "backward")}
        | {f"error {key}": float(f"{value:.2e}") for key, value in found.items()}
    )


def main(settings: Settings) -> None:
    """Measures, prints a table and writes the figures."""
    show = lambda row: print("\n".join(f"{key:>28} {value}" for key, value in row.items()), end="\n\n", flush=True)
    problems, choices = [], []
    for seed, (name, table) in enumerate(tables(settings).items()):
        if not settings.only or name in settings.only:
            problems.append({"problem": name} | measure(settings, table, seed))
            show(problems[-1])
    for P in settings.scored:
        choices.append({"scored pages": P} | {key: round(value, 3) for key, value in choice(settings, P).items()})
        show(choices[-1])
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": {key: str(value) for key, value in dataclasses.asdict(settings).items() if key != "json"},
        "problems": problems,
        "choices": choices,
    }
    settings.json.parent.mkdir(parents=True, exist_ok=True)
    settings.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Settings))
