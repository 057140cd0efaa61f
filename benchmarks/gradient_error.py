"""Relative error of the gradient in bfloat16, through the kernels and by ordinary attention, against float32.

    python benchmarks/gradient_error.py

A model as wide as `--model`, of a few layers, with random weights; the float32 gradient is that of the same weights by
the plain float32 reference. `chunked` is `value_and_grad` through the kernels; `parallel` is full attention with cuDNN
and automatic differentiation. Errors are |g - exact| / |exact| of each weight, all layers together.
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
import tyro
from rich.console import Console
from rich.table import Table

import oomb_jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Relative error of the gradient in bfloat16."""

    model: str = "qwen2.5-7b"
    """A named model, for its sizes."""

    layers: int = 4
    """Layers of it."""

    context: int = 16384
    """Tokens."""

    chunk: int = 4096
    """Tokens of a chunk."""

    implementation: Literal["mosaic", "triton", "reference"] | None = None
    """Attention of `chunked`. None: the fastest that the device can."""

    json: Path = Path("benchmarks/results/gradient-error.json")
    """Where the figures go."""


def gradients(settings: Settings) -> dict[str, Any]:
    """The gradients of the three methods, on the host, in float32."""
    sizes = dataclasses.replace(oomb_jax.models.config(settings.model), num_hidden_layers=settings.layers)
    model = oomb_jax.models.create(sizes, key=jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (settings.context + 1,), 0, sizes.vocab_size, jnp.int32)

    def chunked(model, implementation):
        config = oomb_jax.Config(chunk=settings.chunk, implementation=implementation)
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


def main(settings: Settings) -> None:
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
    report = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": {key: value for key, value in dataclasses.asdict(settings).items() if key != "json"},
        "errors": errors,
    }
    settings.json.parent.mkdir(parents=True, exist_ok=True)
    settings.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(
        f"largest ratio {max(row['chunked'] / row['parallel'] for row in errors.values()):.2f}; wrote {settings.json}"
    )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
