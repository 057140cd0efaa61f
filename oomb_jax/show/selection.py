"""What Top-K attention chooses on one sequence: the pages by layer, how much of dense attention they hold."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track
from rich.table import Table

from oomb_jax import models
from oomb_jax.chunked import fill, start_filling
from oomb_jax.compiler import COMPILER_OPTIONS
from oomb_jax.config import Config
from oomb_jax.pallas_kernels.paged_attention import paged_attention
from oomb_jax.parts import layer_count, split
from oomb_jax.pools import Pools, create_pools
from oomb_jax.selection import TopK, attention_mass, attention_share
from oomb_jax.sequence import Sequence, cut, top_k
from oomb_jax.shapes import iota
from oomb_jax.show import config as settings_
from oomb_jax.show import plots
from oomb_jax.train.checkpoint import CheckpointError, Checkpoints
from oomb_jax.train.config import TrainConfig, load
from oomb_jax.train.data import Batch, Data, check_vocabulary, evaluation_batch, longest, open_data, sample
from oomb_jax.train.metrics import write_whole
from oomb_jax.train.optimizer import build
from oomb_jax.train.plan import CHUNK, DTYPE
from oomb_jax.train.setup import find_device, find_model, weights_directory

CHUNKS, ROWS = 4, 8
"""Chunks whose recall is measured, and query pages in each: dense attention of all would cost its full time."""


class Choice(NamedTuple):
    """What was chosen, on the host."""

    tables: Int[np.ndarray, "n L R M K"]
    """Page ids of every chunk, layer and query page, -1 = none; M is 1 where all heads share a list."""
    query_pages: int
    """Query pages that are no padding."""
    recall: dict[int, Float[np.ndarray, " L"]]
    """By chunk: the share of dense attention probability outside the own chunk that lies on the chosen pages."""
    share: Float[np.ndarray, " L"]
    """Of the pairs of a query and a key that dense attention computes."""


def show(settings: settings_.Selection, console: Console) -> int:
    """Runs the sequence, prints the table, draws the pictures; returns the exit status."""
    base = training_settings(settings)
    device = find_device(settings.platform)
    kind = "cpu" if device.platform == "cpu" else "gpu"
    base = dataclasses.replace(base, dtype=base.dtype or DTYPE[kind])
    config = method(base, settings, CHUNK[kind])
    data = open_data(base.data, tokenizer=base.tokenizer, heldout=base.heldout)
    check_vocabulary(data, find_model(base).vocab_size)
    batch, source = sequence(data, base)
    attention = config.attention
    assert isinstance(attention, TopK)
    weights = f"run {settings.run}" if settings.run else weights_directory(base) or "random weights"
    console.print(
        f"{base.model}, {weights}; {base.ctx:,} tokens of {source}; chunks of {config.chunk:,}, pages of "
        f"{config.page}, {attention.pages} chosen by {attention.scope}",
        soft_wrap=True,
    )
    model = restored(base) if settings.run else create(base)
    choice = run(model, batch, config, console)
    table = describe(choice, config)
    console.print(print_table(table))
    out = settings.out or settings.run or Path("runs") / f"selection-{Path(base.model).name}-{base.ctx}"
    out.mkdir(parents=True, exist_ok=True)
    title = f"{Path(base.model).name}, {base.ctx:,} tokens, {attention.pages} pages of {config.page} chosen"
    paths = [
        plots.draw_choice(choice.tables, choice.query_pages, title, out / "selection.png"),
        plots.draw_recall(choice.recall, choice.tables, config.chunk, title, out / "recall.png"),
        out / "selection.json",
    ]
    write_whole(paths[-1], json.dumps({"title": title, "layers": table}, indent=2) + "\n")
    console.print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)
    return 0


def training_settings(settings: settings_.Selection) -> TrainConfig:
    """Those of the run, or of a new one, with the given flags."""
    if settings.run is None:
        base = TrainConfig(model="tiny", ctx=16_384)
    else:
        base = load(settings.run / "settings.json")
        changed = [name for name in ("model", "weights") if getattr(settings, name) is not None]
        if changed:
            raise ValueError(f"run={settings.run}: has its own model; leave out --{' and --'.join(changed)}")
    names = "model", "weights", "data", "tokenizer", "ctx", "chunk", "page", "implementation"
    given = {name: value for name in names if (value := getattr(settings, name)) is not None}
    base = dataclasses.replace(base, **given, out=settings.run)
    if settings.run is None or settings.pages is not None:
        pages = settings.pages or min(64, max(1, base.ctx // base.page // 4))
        base = dataclasses.replace(base, pages=pages)
    return base.check()


def method(base: TrainConfig, settings: settings_.Selection, chunk: int) -> Config:
    """Settings of the engine, with Top-K attention also where the run was dense."""
    config = base.method(chunk)
    config = dataclasses.replace(config, attention=TopK(pages=base.pages, scope=settings.scope))
    if top_k(base.ctx, config) is None:
        before = (-(-base.ctx // config.chunk) - 1) * config.chunk // config.page
        raise ValueError(
            f"ctx={base.ctx}: at most {max(before, 0)} pages of {config.page} tokens lie before a chunk of "
            f"{config.chunk}, and pages={base.pages} would choose them all; take a longer --ctx, a smaller --chunk or "
            "fewer --pages"
        )
    return config


def sequence(data: Data, base: TrainConfig) -> tuple[Batch, str]:
    """One sequence, held out if there is enough, and what to call it."""
    if data.heldout is not None and longest(data.heldout, pack=base.pack) >= base.ctx:
        return evaluation_batch(data.heldout, index=0, batch=1, ctx=base.ctx, pack=base.pack), f"{base.data}, held out"
    if (most := longest(data.train, pack=base.pack)) < base.ctx:
        raise ValueError(f"ctx={base.ctx}: longer than data={base.data!r}, which has {most} tokens; take more text")
    return sample(data.train, seed=0, step=0, batch=1, ctx=base.ctx, pack=base.pack), f"{base.data}, trained on"


def create(base: TrainConfig) -> Any:
    """The model that the settings name: loaded, or random."""
    directory = weights_directory(base)
    dtype = jnp.dtype(base.dtype)
    if directory is not None:
        return models.load(directory, dtype=dtype, ctx=base.ctx)
    return models.create(find_model(base), key=jax.random.key(base.seed), dtype=dtype)


def restored(base: TrainConfig) -> Any:
    """The model of a run's latest checkpoint."""
    model = models.abstract(find_model(base), dtype=jnp.dtype(base.dtype))
    state = jax.eval_shape(build(base.optimizer_config(), model).init, model)
    try:
        with Checkpoints(base.directory / "checkpoints", keep=base.keep) as checkpoints:
            return checkpoints.restore({"model": model, "optimizer": state})[0]["model"]
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def run(model: Any, batch: Batch, config: Config, console: Console) -> Choice:
    """The fill pass over the first sequence of the batch, and the recall of some chunks."""
    segments = None if batch.segments is None else jnp.asarray(batch.segments[0])
    row = cut(jnp.asarray(batch.tokens[0]), jnp.asarray(batch.labels[0]), segments, config)
    jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    one = jit(lambda model, filling, c: fill(model, filling, row, config, c[None]), donate_argnums=1)
    begin = lambda: start_filling(model, create_pools(model, batch.tokens.shape[1], config), row, config)
    filling = jax.jit(begin)()
    for c in track(range(row.chunks), "fill pass", console=console, transient=True, disable=not console.is_terminal):
        filling = one(model, filling, jnp.int32(c))
        jax.block_until_ready(filling)
    pools = filling.pools
    look = jit(lambda model, pools, c: masses(model, pools, row, c, config))
    recall = {}
    for c in measured_chunks(row.chunks, config):
        chosen, earlier = np.asarray(look(model, pools, jnp.int32(c))).T
        recall[c] = np.where(earlier > 0, chosen / np.where(earlier > 0, earlier, 1), 1)
    assert pools.selection is not None
    share = [float(attention_share(pools.selection[:, l : l + 1], config.page)) for l in range(len(pools.selection[0]))]
    tables = np.asarray(pools.selection)
    return Choice(
        tables=tables.reshape(*tables.shape[:3], -1, tables.shape[-1]),
        query_pages=-(-batch.tokens.shape[1] // config.page),
        recall=recall,
        share=np.array(share),
    )


def measured_chunks(chunks: int, config: Config) -> list[int]:
    """Some chunks that had to choose, the last among them, evenly spread."""
    assert isinstance(config.attention, TopK)
    first = config.attention.pages * config.page // config.chunk + 1
    return sorted({round(c) for c in np.linspace(first, chunks - 1, CHUNKS)})


def masses(model: Any, pools: Pools, row: Sequence, c: Int[Array, ""], config: Config) -> Float[Array, "L 2"]:
    """Runs one chunk again on filled pools; of each layer what `attention_mass` says of some of its query pages."""
    outer, layers = split(model)
    held, selection = pools.hbm, pools.selection
    assert held is not None
    assert selection is not None
    first_page, rows = c * (row.chunk // config.page), row.chunk // config.page
    # Padding at the end of the sequence has nothing to say.
    real = jnp.clip(-(-(row.length - c * row.chunk) // config.page), 1, rows)
    sample = (iota(min(ROWS, rows)) * real) // min(ROWS, rows)
    segments: dict[str, Any] = {}
    if row.segments is not None:
        by_page = row.segments.reshape(-1, config.page)
        segments = {"q_segments": row.segments[c], "pool_segments": by_page}

    def body(h, x):
        l, layer = x
        q, k, v = layer.attention_inputs(h, row.positions(c))
        table = selection[c, l]
        mass = attention_mass(q, k, held.k, l, first_page, table, sample, **segments)
        o, _ = paged_attention(*(q, k, v, held.k, held.v, l, table), implementation=config.implementation, **segments)
        return layer.attention_output(h, o), jnp.stack(mass)

    return lax.scan(body, outer.embed(row.tokens[c]), (iota(layer_count(layers)), layers))[1]


def describe(choice: Choice, config: Config) -> list[dict[str, Any]]:
    """A record for each layer."""
    n, L, R, _, _ = choice.tables.shape
    query = np.arange(n * R).reshape(n, R, 1, 1)
    records = []
    for l in range(L):
        table = choice.tables[:, l]
        chosen = table >= 0
        rows = np.broadcast_to(query, table.shape)[chosen]
        votes = np.bincount(table[chosen], minlength=n * R) / table.shape[2]
        most = int(np.argmax(votes))
        could = choice.query_pages - (most // R + 1) * R  # query pages of later chunks
        records.append(
            {
                "layer": l,
                "distinct_pages": float(np.mean([len(np.unique(t[t >= 0])) for t in table])),
                "attention_share": float(choice.share[l]),
                "recall": float(np.mean([by_layer[l] for by_layer in choice.recall.values()])),
                "median_distance": int(np.median(rows - table[chosen])) * config.page,
                "most_chosen_page": most,
                "chosen_by": float(votes[most] / could),
            }
        )
    return records


def print_table(records: list[dict[str, Any]]) -> Table:
    """The records for people."""
    columns = "layer", "distinct pages\nof a chunk", "share of\nattention", "recall", "median distance\n(tokens)"
    table = Table(*columns, "most chosen page", title="what each layer chooses")
    for r in records:
        table.add_row(
            *(f"{r['layer']}", f"{r['distinct_pages']:,.1f}", f"{r['attention_share']:.1%}", f"{r['recall']:.1%}"),
            *(f"{r['median_distance']:,}", f"{r['most_chosen_page']:,} (by {r['chosen_by']:.0%})"),
        )
    return table
