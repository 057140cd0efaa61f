"""Three errors of the gradient: of the kernels' rounding, of Top-K attention, and of narrow pools in host memory.

    python benchmarks/gradient_error.py
    python benchmarks/gradient_error.py --compare topk --contexts 16384 65536 262144 --budgets 4 16 64 256
    python benchmarks/gradient_error.py --compare pools --layers 28 --hbm-layers 8 --context 65536

`--compare kernels`: bfloat16 against float32. A model as wide as `--model`, of a few layers, with random weights; the
float32 gradient is that of the same weights by the plain float32 reference. `chunked` is `value_and_grad` through the
kernels; `parallel` is full attention with cuDNN and automatic differentiation. Errors are |g - exact| / |exact| of each
weight, all layers together.

`--compare topk`: |Top-K - dense| / |dense| by context and number of chosen pages, by layer and by kind of weight, of
such a model or of trained weights on text. The figures are added to those that the file already holds, so a large grid
can be measured in parts.

`--compare pools`: |narrow - wide| / |wide| of a Top-K step of the first of `--budgets`. Wide: keys and values in the
model's dtype, their gradients and those of the weights in float32, all pools on the device. Narrow: what
`--kv-dtype`, `--kv-grad-dtype`, `--grad-dtype`, `--hbm-layers` and `--remat` say, by default the dtypes that four
million tokens of a 7B model take, and the pools of one layer on the device. Once with the pages that each step
chooses, where rounding tips near ties, and once with the same pages for both.
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
from selections import Choice, forced

import oomb_jax
from oomb_jax.config import Remat
from oomb_jax.train import data

RESULTS = Path("benchmarks/results")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Relative error of the gradient: of bfloat16 kernels, of Top-K attention, or of narrow pools."""

    compare: Literal["kernels", "topk", "pools"] = "kernels"
    """`kernels`: bfloat16 against float32. `topk`: Top-K against dense attention. `pools`: narrow ones in host memory
    against wide ones on the device."""

    model: str = "qwen2.5-7b"
    """A named model, for its sizes."""

    layers: int = 4
    """Layers of it."""

    weights: Path | None = None
    """`topk` and `pools`: a Hugging Face directory, with all its layers, instead of random weights of a named model."""

    data: str | None = None
    """`topk` and `pools`: text, as in training. None: random tokens, of which trained weights make nothing."""

    tokenizer: str | None = None
    """`topk` and `pools`: `bytes`, or a `tokenizer.json` or a directory that holds one. None: as in training."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """`topk` and `pools`: dtype of the weights and the computation."""

    context: int = 16384
    """`kernels` and `pools`: tokens."""

    contexts: tuple[int, ...] = (16384, 65536)
    """`topk`: tokens."""

    budgets: tuple[int, ...] | None = None
    """Pages that a query page chooses. None: 4, 16, 64 and 256 for `topk`, 64 for `pools`."""

    kv_dtype: str | None = "float8_e4m3fn"
    """`pools`: dtype of keys and values. None: the model's."""

    kv_grad_dtype: str = "bfloat16"
    """`pools`: dtype of their gradients."""

    grad_dtype: str = "bfloat16"
    """`pools`: dtype of the weights' gradients."""

    hbm_layers: int = 1
    """`pools`: layers whose pools stay on the device."""

    remat: Remat = "full"
    """`pools`: what the recomputed chunk keeps."""

    chunk: int = 4096
    """Tokens of a chunk."""

    page: int = 128
    """Tokens of a page."""

    implementation: Literal["mosaic", "triton", "reference"] | None = None
    """Attention of `chunked`, of `topk` and of `pools`. None: the engine's choice."""

    json: Path | None = None
    """Where the figures go. None: gradient-error.json, topk-error.json or pools-error.json in benchmarks/results."""

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
    model = load(settings)
    config = oomb_jax.Config(chunk=settings.chunk, page=settings.page, implementation=settings.implementation)
    budgets = settings.budgets or (4, 16, 64, 256)
    for context in settings.contexts:
        found = topk_error.measure(model, tokens(settings, context, model.config.vocab_size), config, budgets)
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


def compare_pools(settings: Settings) -> None:
    """Measures, prints a table and writes the figures."""
    model = load(settings)
    ids = tokens(settings, settings.context, model.config.vocab_size)
    pages = (settings.budgets or (64,))[0]
    same = "chunk", "page", "implementation"
    wide = oomb_jax.Config(attention=oomb_jax.TopK(pages=pages), **{name: getattr(settings, name) for name in same})
    narrowed = "kv_dtype", "kv_grad_dtype", "grad_dtype", "hbm_layers", "remat"
    narrow = dataclasses.replace(wide, **{name: getattr(settings, name) for name in narrowed})
    choices: tuple[Choice, ...] = "random", "model"
    found = {}
    for choice in choices:
        with forced(choice, repeated=True):
            exact, exact_loss, _ = topk_error.gradient(model, ids, wide)
            grads, loss, told = topk_error.gradient(model, ids, narrow)
        found[choice] = topk_error.relative(grads, exact) | {"loss": loss, "wide_loss": exact_loss, **told}
        del exact, grads
        print(f"{choice} pages: {found[choice]['error']:.3e}", flush=True)
    table = Table(
        "weight", *(f"{choice} pages" for choice in choices), title=f"{pages} pages, {settings.context:,} tokens"
    )
    of_kind = lambda x: f"{float(np.sqrt(np.mean(np.square(x)))):.2e}"
    for name in found["model"]["by_weight"]:
        table.add_row(name, *(of_kind(found[choice]["by_weight"][name]) for choice in choices))
    Console(width=100).print(table)
    sizes = ("model", "layers") if settings.weights is None else ("weights",)
    used = *sizes, "data", "tokenizer", "dtype", "context", *same, *narrowed
    told = {name: str(value) if isinstance(value := getattr(settings, name), Path) else value for name in used}
    path = settings.json or RESULTS / "pools-error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = about() | {"settings": told | {"pages": pages}, "errors": found}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def load(settings: Settings) -> Any:
    """The model of `topk` and of `pools`."""
    if settings.weights is not None:
        return oomb_jax.models.load(settings.weights, dtype=settings.dtype)
    sizes = dataclasses.replace(oomb_jax.models.config(settings.model), num_hidden_layers=settings.layers)
    return oomb_jax.models.create(sizes, key=jax.random.key(0), dtype=settings.dtype)


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
    {"kernels": compare_kernels, "topk": compare_topk, "pools": compare_pools}[settings.compare](settings)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
