"""Speed and memory of one whole `value_and_grad`, by context, beside the way one trains without this library.

    python benchmarks/bench_step.py --contexts 16384 65536
    python benchmarks/bench_step.py --contexts 16384 65536 --method parallel
    python benchmarks/bench_step.py --contexts 65536 --attention topk --selection random
    python benchmarks/bench_step.py --contexts 16384 --profile

Random weights and tokens, no optimizer. `chunked` is `value_and_grad`; `parallel` is full attention with cuDNN and a
checkpoint for each layer. Every context is measured in a process of its own, so that the allocator's peak is of
that step alone: weights, gradients, pools and everything temporary.

The figures are added to those that the JSON file already holds; then all of them are printed as a table and drawn. The
share of the peak counts the operations that the gradient needs (6 for each parameter and token, and the causal half of
attention), not those that are computed again; also with Top-K, which computes less, so there the table leaves it out.

What Top-K costs hangs on what it chooses, so `--selection` can force the two ends: `random`, every query page other
pages, nearly disjoint where there are many; `same`, all query pages of a chunk the same ones. Pages are scored all the
same. The record has the distinct pages of a chunk and layer, and the bytes that move if each of them moves once a pass.

`--profile` traces one more step and prints its kernels' time by phase and kind, and the time that the same matrix
products take alone. The trace stays in `--trace`, for XProf or Perfetto.
"""

import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Literal

import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from selections import forced, page_traffic

from oomb_jax.config import Config, Remat
from oomb_jax.forward import together
from oomb_jax.plan import Job, account, host_available
from oomb_jax.plan.machine import for_pools
from oomb_jax.selection import attention_share
from oomb_jax.train.metrics import model_flops, peak_flops

GIB = 2**30
COLOURS = {"dense": "#0072B2", "topk": "#009E73", "parallel": "#D55E00"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Speed and memory of one value_and_grad by context."""

    contexts: tuple[int, ...] = (16384, 65536)
    """Tokens of a sequence."""

    method: Literal["chunked", "parallel"] = "chunked"
    """`chunked`: this library. `parallel`: full attention with cuDNN and a checkpoint for each layer."""

    model: str = "qwen2.5-7b"
    """A named model, with random bfloat16 weights."""

    attention: Literal["dense", "topk"] = "dense"
    """What a query attends to, `chunked` only."""

    pages: int = 64
    """Pages that a query page chooses, with `topk`."""

    selection: Literal["model", "random", "same"] = "model"
    """Which pages those are: what the `model` chooses, `random` ones, or the `same` for all query pages of a chunk."""

    chunk: int = 4096
    """Tokens of a chunk."""

    remat: Remat = "dots"
    """What the recomputed chunk keeps."""

    grad_dtype: str = "float32"
    """dtype of the gradients."""

    kv_dtype: str | None = None
    """dtype of the key and value pools, such as float8_e4m3fn. None: the model's."""

    kv_grad_dtype: str = "float32"
    """dtype of the key and value gradient pools."""

    hbm_layers: int | None = None
    """Layers whose pools stay in the GPU's memory; the others' are on the host. None: all, `chunked` only."""

    matmul: Literal["mosaic", "reference"] | None = None
    """Which products of layers run. None: the kernel where pages are fetched, else XLA's."""

    implementation: Literal["mosaic", "triton", "reference"] | None = None
    """Which attention runs. None: the fastest that the device can."""

    steps: int = 2
    """Steps that count, after one that does not; the median is taken. 0: the first one counts, where it takes long."""

    profile: bool = False
    """Trace one more step and break its time down."""

    trace: Path = Path("runs/trace")
    """Where the trace goes."""

    json: Path = Path("benchmarks/results/step.json")
    """Where the figures are kept."""

    figure: Path = Path("docs/step.png")
    """Where they are drawn."""

    def __post_init__(self):
        if self.selection != "model" and (self.attention != "topk" or self.method != "chunked"):
            raise ValueError(f"selection={self.selection!r}: of --attention topk and --method chunked only")


def check_host(model: Any, config: Config, context: int, free: int) -> None:
    """ValueError where so many free bytes are too few for the pools on the host: the system would kill the process."""
    job = Job(model=model, config=config, ctx=context)
    host, room = account(job).host, for_pools(free)
    pools = host["kv"] + host["kv_gradients"]
    if pools > room:
        more = math.ceil(job.host_layers * (1 - room / pools))
        raise ValueError(
            f"--contexts {context}: pools of {pools / GIB:.1f} GiB in host memory, which has room for "
            f"{room / GIB:.1f}; take --hbm-layers {(config.hbm_layers or 0) + more}, narrower pools "
            "(--kv-dtype float8_e4m3fn, --kv-grad-dtype bfloat16) or fewer tokens"
        )


def measure(settings: Settings, context: int) -> dict[str, Any]:
    """One context; runs in a process of its own."""
    import functools

    import jax
    import jax.numpy as jnp

    import oomb_jax

    plain = "chunk", "remat", "grad_dtype", "kv_dtype", "kv_grad_dtype", "hbm_layers", "implementation", "matmul"
    attention = oomb_jax.TopK(pages=settings.pages) if settings.attention == "topk" else oomb_jax.Dense()
    config = oomb_jax.Config(attention=attention, **{key: getattr(settings, key) for key in plain})
    if settings.method == "chunked":
        check_host(oomb_jax.models.abstract(settings.model), config, context, host_available())
    model = oomb_jax.models.create(settings.model, key=jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (context + 1,), 0, model.config.vocab_size, jnp.int32)
    pools = oomb_jax.create_pools(model, context, config) if settings.method == "chunked" else None
    function = {
        "chunked": oomb_jax.value_and_grad,
        "parallel": functools.partial(oomb_jax.full_attention_value_and_grad, implementation="cudnn"),
    }[settings.method]
    options = {"donate_argnums": 1, "compiler_options": oomb_jax.COMPILER_OPTIONS}
    start = time.perf_counter()
    step = jax.jit(functools.partial(function, config=config), **options)
    with forced(settings.selection):
        step = step.lower(model, pools, ids[:-1], ids[1:]).compile()
    compiled_in = time.perf_counter() - start
    print(f"{context:,} tokens: compiled in {compiled_in:.1f} s", flush=True)

    def run():
        nonlocal pools
        start = time.perf_counter()
        loss, grads, pools = step(model, pools, ids[:-1], ids[1:])
        jax.block_until_ready(grads)
        assert jnp.isfinite(loss)
        seconds = time.perf_counter() - start
        print(f"{context:,} tokens: {seconds:.2f} s", flush=True)
        return seconds

    first, *others = (run() for _ in range(1 + settings.steps))
    seconds = statistics.median(others or [first])
    sizes = model.config
    matrices = sum(x.size for x in jax.tree.leaves(model.layers)) + sizes.vocab_size * sizes.hidden_size
    share = 1.0
    if pools is not None and pools.selection is not None:
        share = float(attention_share(pools.selection, config.page))
    flops = model_flops(
        parameters=matrices,
        layers=sizes.num_hidden_layers,
        query_heads=sizes.num_attention_heads,
        head_dim=sizes.head_dim,
        tokens=context,
        attention_share=share,
    )
    device = jax.devices()[0]
    peak = peak_flops(device)
    record = {
        "context": context,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(context / seconds, 1),
        "share_of_peak": round(flops / seconds / peak, 4) if peak else None,
        "memory_gib": round((device.memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB, 4),
        "compile_seconds": round(compiled_in, 1),
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
    }
    if pools is not None and pools.selection is not None:
        keys = config.page * sizes.num_key_value_heads * sizes.head_dim  # numbers in a page of keys, or of values
        widths = (jnp.dtype(config.kv_dtype or "bfloat16"), jnp.dtype(config.kv_grad_dtype or "float32"))
        kv, gradient = (2 * keys * width.itemsize for width in widths)
        # What is widened from float8 comes anew for each chunk.
        chunks = together(pools, config) if pools.any_layers.k_scale is None else 1
        record |= page_traffic(pools.selection, kv_page=kv, gradient_page=gradient, together=chunks)
    if settings.profile:
        from step_profile import breakdown

        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = options.python_tracer_level = 0  # of a long step they would be millions of events
        with jax.profiler.trace(str(settings.trace), profiler_options=options):
            seconds = run()
        record["profile"] = breakdown(settings.trace, seconds, sizes, context, config)
    return record


def collect(settings: Settings) -> list[dict[str, Any]]:
    """Measures every context and adds the records to the file; all records of the file."""
    numbers = "chunk", "remat", "grad_dtype", "kv_dtype", "kv_grad_dtype", "hbm_layers"
    kept = "method", "model", "attention", "pages", "selection", *numbers, "implementation", "matmul", "steps"
    about = {key: getattr(settings, key) for key in kept}
    identity = lambda record: [record.get(key) for key in ("context", *kept)]
    records = json.loads(settings.json.read_text(encoding="utf-8")) if settings.json.exists() else []
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # JAX would take three quarters and no more
    settings.json.parent.mkdir(parents=True, exist_ok=True)
    for context in settings.contexts:
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
            record = about | pool.submit(measure, settings, context).result()
        records = [old for old in records if identity(old) != identity(record)] + [record]
        settings.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return records


def label(record: dict[str, Any]) -> str:
    """What tells a record from others of the same context."""
    short = {"float32": "f32", "bfloat16": "bf16"}
    dtypes = f"{short[record['grad_dtype']]}/{short[record['kv_grad_dtype']]} gradients"
    if record["method"] == "parallel":
        return f"parallel, checkpoint per layer, {dtypes}"
    attention = "dense"
    if record["attention"] == "topk":
        chosen = "" if record["selection"] == "model" else f" ({record['selection']})"
        attention = f"top {record['pages']} pages{chosen}"
    if record.get("kv_dtype") is not None:  # older records do not have it
        attention += f", {record['kv_dtype']}"
    if record["hbm_layers"] is not None:
        attention += f", {record['hbm_layers']} layers in HBM"
    if record.get("matmul") is not None:
        attention += f", {record['matmul']} products"
    return f"chunked, {attention}, chunk {record['chunk']}, {record['remat']}, {dtypes}"


def table(records: list[dict[str, Any]]) -> Table:
    """All records, a row each."""
    columns = "setting", "context", "seconds", "tokens/s", "of peak", "memory (GiB)"
    title = f"{records[-1]['model']} on {records[-1]['device']}"
    result = Table(*columns, "distinct pages", "pages moved (GB)", title=title)
    for r in sorted(records, key=lambda r: (label(r), r["context"])):
        share = "" if r["share_of_peak"] is None else f"{r['share_of_peak']:.1%}"
        figures = f"{r['seconds']:.2f}", f"{r['tokens_per_second']:,.0f}", share, f"{r['memory_gib']:.1f}"
        pages = "", ""
        if "distinct_pages" in r:
            pages = f"{r['distinct_pages']:,.0f}", f"{sum(r['gigabytes'].values()):,.1f}"
        result.add_row(label(r), f"{r['context']:,}", *figures, *pages)
    return result


def draw(records: list[dict[str, Any]]) -> Figure:
    """Left, speed by context; right, memory by context. Forced selections are in the table alone."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [r for r in records if r["selection"] == "model"]
    looks = {kind: iter([*zip(("-", "--", ":", "-."), "osD^", strict=True)] * 4) for kind in COLOURS}
    for name in sorted({label(r) for r in shown}):
        line = sorted((r for r in shown if label(r) == name), key=lambda r: r["context"])
        kind = "parallel" if line[0]["method"] == "parallel" else line[0]["attention"]
        dashes, marker = next(looks[kind])
        style = {"color": COLOURS[kind], "linestyle": dashes, "marker": marker, "label": name}
        for one, key in (left, "tokens_per_second"), (right, "memory_gib"):
            one.plot([r["context"] for r in line], [r[key] for r in line], **style)
    for one, title in (left, "tokens per second"), (right, "peak memory (GiB)"):
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(lambda x, _: f"{x / 2**20:.0f}M" if x >= 2**20 else f"{x / 2**10:.0f}K")
        one.yaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        one.set_ylim(bottom=0)
        one.set_xlabel("tokens in the sequence")
        one.set_ylabel(title)
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{records[-1]['model']}, one gradient, {records[-1]['device']}", fontsize=10)
    return figure


def print_profile(console: Console, record: dict[str, Any]) -> None:
    """The breakdown of one step."""
    profile = record["profile"]
    kinds = sorted({kind for phase in profile["phases"].values() for kind in phase})
    result = Table("phase", *kinds, "all", title=f"milliseconds of a step at {record['context']:,} tokens")
    for name, phase in profile["phases"].items():
        cells = [f"{phase.get(kind, 0):,.1f}" for kind in kinds]
        result.add_row(name, *cells, f"{sum(phase.values()):,.1f}")
    console.print(result)
    console.print(
        f"accounted for: {profile['accounted']:.1%} of {profile['seconds']:.2f} s; matrix products: "
        f"{profile['matmul_alone_over_step']:.2f} of the rate that they reach alone"
    )


def main(settings: Settings) -> None:
    """Measures, prints and draws."""
    console = Console(width=140)
    records = collect(settings)
    console.print(table(records))
    settings.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(records).savefig(settings.figure, dpi=150)
    for record in records:
        if "profile" in record and record["context"] in settings.contexts:
            print_profile(console, record)
    print(f"wrote {settings.json} and {settings.figure}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
