"""Memory of one `value_and_grad` by context: as the compiler reports it, and on a GPU as its allocator measures it.

    python benchmarks/memory_by_context.py --model qwen2.5-7b --run 32768

Every step is compiled from shapes for the default device. Weights, gradients and pools are arguments and results of the
step, temporaries are what it takes besides; an optimizer is not part of it. Up to the context `--run` the step also
runs once, from the shortest context on, and the allocator's peak is read after each.

The yardstick is `full_attention_value_and_grad`: attention that keeps its scores, and automatic differentiation that
keeps the activations of all tokens. A flash-attention kernel with gradient checkpointing, which is not measured here,
needs far less than the yardstick; `docs/method.md` has the account.

Writes the figures as JSON and draws them.
"""

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from matplotlib.figure import Figure

import oomb_jax
from oomb_jax.config import Remat

GIB = 2**30
KINDS = {"weights": "#6b6b6b", "gradients": "#56B4E9", "pools": "#0072B2", "temporaries": "#009E73"}
CHUNKED, YARDSTICK = "#0072B2", "#D55E00"
FULL, MEASURED = "full_attention_temporaries", "measured_peak"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Memory of one value_and_grad by context."""

    model: str = "qwen2.5-7b"
    """A named model."""

    contexts: tuple[int, ...] = tuple(2**i for i in range(12, 21))
    """Lengths of the sequence."""

    run: int = 0
    """The longest context at which the step also runs, on a GPU; 0: none."""

    yardstick: int = 2**17
    """The longest context at which full attention is compiled too; 0: none."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of the parameters, the keys and the values."""

    chunk: int = 4096
    """Tokens of a chunk."""

    remat: Remat = "dots"
    """What a recomputed chunk keeps."""

    kv_grad_dtype: Literal["bfloat16", "float32"] = "float32"
    """dtype of the gradient pools."""

    json: Path | None = None
    """Where the figures go. None: benchmarks/results/memory-MODEL.json."""

    figure: Path = Path("docs/memory.png")
    """Where the picture goes."""

    def __post_init__(self):
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts={self.contexts}: one length or more, each at least 1")
        if list(self.contexts) != sorted(self.contexts):
            raise ValueError(f"contexts={self.contexts}: rising, for a measured peak is that of all before it")


def measure(settings: Settings, context: int) -> dict[str, int]:
    """Bytes of the step at one context, by kind."""
    config = oomb_jax.Config(chunk=settings.chunk, remat=settings.remat, kv_grad_dtype=settings.kv_grad_dtype)
    model = oomb_jax.models.abstract(settings.model, dtype=settings.dtype)
    pools = jax.eval_shape(lambda model: oomb_jax.create_pools(model, context, config), model)
    ids = jax.ShapeDtypeStruct((context,), jnp.int32)
    step = jax.jit(oomb_jax.value_and_grad, static_argnames="config", donate_argnames="pools")
    compiled = step.lower(model, pools, ids, ids, config).compile()
    analysis = _analysis(compiled)
    gradients = jax.eval_shape(lambda *arguments: step(*arguments, config)[1], model, pools, ids, ids)
    # The pools come back in the memory that they came in; a copy of them would be among the temporaries.
    assert analysis.alias_size_in_bytes >= tree_bytes(pools)
    record = {
        "context": context,
        "weights": tree_bytes(model),
        "gradients": tree_bytes(gradients),
        "pools": tree_bytes(pools),
        "temporaries": analysis.temp_size_in_bytes,
    }
    if context <= settings.run:
        record[MEASURED] = run(settings, config, context, compiled)
    if context <= settings.yardstick:
        full = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")
        # To choose kernels a GPU's compiler runs them, for which it would take the memory that is not there.
        options = {} if jax.default_backend() == "cpu" else {"xla_gpu_autotune_level": 0}
        compiled = full.lower(model, None, ids, ids, config).compile(options)
        record[FULL] = _analysis(compiled).temp_size_in_bytes
    return record


def run(settings: Settings, config: oomb_jax.Config, context: int, compiled: Any) -> int:
    """Runs the step once with random weights and tokens; the allocator's peak in bytes since the process began."""
    model = oomb_jax.models.create(settings.model, key=jax.random.key(0), dtype=settings.dtype)
    pools = oomb_jax.create_pools(model, context, config)
    ids = jax.random.randint(jax.random.key(1), (context,), 0, model.config.vocab_size, jnp.int32)
    loss, _, _ = compiled(model, pools, ids, ids)
    assert jnp.isfinite(loss)
    stats = jax.devices()[0].memory_stats()
    if not stats:
        raise NotImplementedError(f"run={settings.run}: {jax.default_backend()} does not measure memory; use a GPU")
    return stats["peak_bytes_in_use"]


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def draw(settings: Settings, records: Sequence[dict[str, int]], device: str) -> Figure:
    """Left, bytes by kind, one on the other; right, their sum against the yardstick's, both on logarithmic axes."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    total = [0.0] * len(records)
    for kind, colour in KINDS.items():
        heights = [record[kind] / GIB for record in records]
        left.bar(range(len(records)), heights, bottom=total, color=colour, width=0.7, label=kind)
        total = [low + height for low, height in zip(total, heights, strict=True)]
    left.set_xticks(range(len(records)), [_tokens(record["context"]) for record in records])
    left.set_xlabel("tokens in the sequence")

    right.plot([record["context"] for record in records], total, color=CHUNKED, marker="o", label="value_and_grad")
    measured = [(record["context"], record[MEASURED] / GIB) for record in records if MEASURED in record]
    if measured:
        style = {"color": "black", "marker": "x", "linestyle": "none", "zorder": 3}
        right.plot(*zip(*measured, strict=True), label="value_and_grad, measured", **style)
    full = [record for record in records if FULL in record]
    sums = [(record["weights"] + record["gradients"] + record[FULL]) / GIB for record in full]
    if full:
        right.plot([record["context"] for record in full], sums, color=YARDSTICK, marker="o", label="full attention")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.xaxis.set_major_formatter(lambda x, _: _tokens(x))
    right.yaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    right.set_xlabel("tokens in the sequence (both axes logarithmic)")

    for axes, corner in ((left, "upper left"), (right, "center right")):
        axes.set_ylabel("memory (GiB)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc=corner)
    figure.suptitle(
        f"{settings.model}, {settings.dtype}, chunk {settings.chunk:,}, remat {settings.remat}; "
        f"one gradient, compiled for {device}",
        fontsize=10,
    )
    return figure


def _tokens(count: float) -> str:
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count / unit:.0f}{name}"
    return f"{count:,.0f}"


def _analysis(compiled: Any) -> Any:
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise NotImplementedError(f"{jax.default_backend()}: its compiler does not report memory; run this elsewhere")
    return analysis


def main(settings: Settings) -> None:
    """Measures, writes and draws."""
    device = jax.devices()[0].device_kind
    records = []
    for context in settings.contexts:
        records.append(measure(settings, context))
        print(", ".join(f"{name} {value:,}" for name, value in records[-1].items()), flush=True)
    path = settings.json or Path("benchmarks/results") / f"memory-{settings.model}.json"
    about = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "jax": jax.__version__,
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("json", "figure")},
        "unit": "bytes",
        "records": records,
    }
    for each in (path, settings.figure):
        each.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    draw(settings, records, device).savefig(settings.figure, dpi=150)
    print(f"wrote {path} and {settings.figure}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
