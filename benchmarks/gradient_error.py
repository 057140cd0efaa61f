"""Two errors of the gradient: of the kernels' rounding, and of Top-K attention.

    python benchmarks/gradient_error.py
    python benchmarks/gradient_error.py --compare topk --contexts 16384 65536 262144 --budgets 4 16 64 256

`--compare kernels`: bfloat16 against float32. A model as wide as `--model`, of a few layers, with random weights; the
float32 gradient is that of the same weights by the plain float32 reference. `chunked` is `value_and_grad` through the
kernels; `parallel` is full attention with cuDNN and automatic differentiation. Errors are |g - exact| / |exact| of each
weight, all layers together.

`--compare topk`: |Top-K - dense| / |dense| by context and number of chosen pages, by layer and by kind of weight, of
such a model or of trained weights on text. The figures are added to those that the file already holds, so a large grid
can be measured in parts.
"""

import dataclasses
import datetime
import functools
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import topk_error
import tyro
from rich.console import Console
from rich.table import Table

import oomb_jax
from oomb_jax.train import data

RESULTS = Path("benchmarks/results")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Relative error of the gradient: of bfloat16 kernels, or of Top-K attention."""

    compare: Literal["kernels", "topk"] = "kernels"
    """`kernels`: bfloat16 against float32. `topk`: Top-K against dense attention."""

    model: str = "qwen2.5-7b"
    """A named model, for its sizes."""

    layers: int = 4
    """Layers of it."""

    weights: Path | None = None
    """`topk`: a Hugging Face directory, with all its layers, instead of random weights of a named model."""

    data: str | None = None
    """`topk`: text, as in the training program. None: random tokens, of which trained weights make nothing."""

    tokenizer: str | None = None
    """`topk`: `bytes`, or a `tokenizer.json` or a directory that holds one. None: as in the training program."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """`topk`: dtype of the weights and the computation."""

    context: int = 16384
    """`kernels`: tokens."""

    contexts: tuple[int, ...] = (16384, 65536)
    """`topk`: tokens."""

    budgets: tuple[int, ...] = (4, 16, 64, 256)
    """`topk`: pages that a query page chooses."""

    chunk: int = 4096
    """Tokens of a chunk."""

    page: int = 128
    """Tokens of a page."""

    implementation: Literal["mosaic", "triton", "reference"] | None = None
    """Attention of `chunked`, or of `topk`. None: the engine's choice."""

    json: Path | None = None
    """Where the figures go. None: gradient-error.json or topk-error.json in benchmarks/results."""

    figure: Path = Path("docs/topk-error.png")
    """Where `topk` is drawn."""


def gradients(settings: Settings) -> dict[str, Any]:
    """The gradients of the three methods, on the host, in float32."""
    sizes = dataclasses.replace(oomb_jax.models.config(settings.model), num_hidden_layers=settings.layers)
    model = oomb_jax.models.create(sizes, key=jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (settings.context + 1,), 0, sizes.vocab_size, jnp.int32)

    def chunked(model, implementation):
        config = oomb_jax.Config(chunk=settings.chunk, page=settings.page, implementation=implementation)
        pools = oomb_jax.create_pools(model, settings.context, config)
        step = functools.partial(oomb_jax.value_and_grad, config=config)
        step = jax.jit(step, donate_argnums=1, compiler_options=oomb_jax.COMPILER_OPTIONS)
        return step(model, pools, ids[:-1], ids[1:])[1]

    def parallel(model):
        step = functools.partial(oomb_jax.full_attention_value_and_grad, implementation="cudnn")
        return jax.jit(functools.partial(step, config=oomb_jax.Config()))(model, None, ids[:-1], ids[1:])[1]

    found = {
        "chunked": jax.device_get(chunked(model, settings.implementation)),
        "parallel": jax.device_get(parallel(model)),
    }
    with jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), model)
        found["exact"] = jax.device_get(chunked(wide, "reference"))
    return found


def compare_kernels(settings: Settings) -> None:
    """Measures, prints a table and writes the figures."""
    found = gradients(settings)
    exact = jax.tree.leaves(found["exact"])
    names = jax.tree.leaves(oomb_jax.models.parameter_names(found["exact"]))
    relative = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    errors = {
        name: {method: relative(jax.tree.leaves(found[method])[i], exact[i]) for method in ("chunked", "parallel")}
        for i, name in enumerate(names)
    }
    table = Table("weight", "chunked", "parallel", "ratio", title=f"{settings.model}, {settings.layers} layers")
    for name, row in errors.items():
        table.add_row(
            name, f"{row['chunked']:.2e}", f"{row['parallel']:.2e}", f"{row['chunked'] / row['parallel']:.2f}"
        )
    Console(width=100).print(table)
    used = "model", "layers", "context", "chunk", "implementation"
    report = about() | {"settings": {name: getattr(settings, name) for name in used}, "errors": errors}
    path = settings.json or RESULTS / "gradient-error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"largest ratio {max(row['chunked'] / row['parallel'] for row in errors.values()):.2f}; wrote {path}")


def about() -> dict[str, str]:
    """Where and when."""
    kind = jax.devices()[0].device_kind
    return {"date": datetime.date.today().isoformat(), "device": kind, "jax": jax.__version__}


def compare_topk(settings: Settings) -> None:
    """Measures the grid, adds it to the file, prints and draws all of the model's figures."""
    path = settings.json or RESULTS / "topk-error.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    if not isinstance(records, list):
        raise SystemExit(f"json={path}: figures of --compare kernels; name another file")
    name = str(settings.weights) if settings.weights else f"{settings.model}, {settings.layers} layers, random weights"
    setting = {
        **{"model": name, "data": settings.data or "random tokens", "dtype": settings.dtype},
        **{"chunk": settings.chunk, "page": settings.page, "implementation": settings.implementation},
    }
    of_setting = lambda record: all(record[key] == value for key, value in setting.items())
    if settings.weights is None:
        sizes = dataclasses.replace(oomb_jax.models.config(settings.model), num_hidden_layers=settings.layers)
        model = oomb_jax.models.create(sizes, key=jax.random.key(0), dtype=settings.dtype)
    else:
        model = oomb_jax.models.load(settings.weights, dtype=settings.dtype)
    config = oomb_jax.Config(chunk=settings.chunk, page=settings.page, implementation=settings.implementation)
    for context in settings.contexts:
        found = topk_error.measure(model, tokens(settings, context, model.config.vocab_size), config, settings.budgets)
        new = {(r["context"], r["pages"]) for r in found}
        records = [r for r in records if not of_setting(r) or (r["context"], r["pages"]) not in new]
        records += [setting | about() | r for r in found]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    mine = [record for record in records if of_setting(record)]
    for table in topk_error.tables(mine):
        Console(width=120).print(table)
    settings.figure.parent.mkdir(parents=True, exist_ok=True)
    topk_error.draw(mine, f"{name}, {setting['data']}, {settings.dtype}").savefig(settings.figure, dpi=150)
    print(f"wrote {path} and {settings.figure}")


def tokens(settings: Settings, context: int, vocabulary: int) -> jax.Array:
    """A sequence, of text or random."""
    if settings.data is None:
        return jax.random.randint(jax.random.key(1), (context,), 0, vocabulary, jnp.int32)
    text = data.open_data(settings.data, tokenizer=settings.tokenizer)
    data.check_vocabulary(text, vocabulary)
    held = text.heldout
    view = held if held is not None and data.longest(held) >= context else text.train
    return jnp.asarray(data.evaluation_batch(view, index=0, batch=1, ctx=context, repeat=False).tokens[0])


def main(settings: Settings) -> None:
    """Runs the comparison that is asked for."""
    {"kernels": compare_kernels, "topk": compare_topk}[settings.compare](settings)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
