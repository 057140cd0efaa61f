"""How far the gradient of Top-K attention is from that of dense attention: `gradient_error.py --compare topk`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from rich.table import Table

import oomb_jax
from oomb_jax.models import parameter_names
from oomb_jax.selection import statistics

Squares = dict[str, Float[Array, "..."]]


def measure(
    model: Any, tokens: Int[Array, " T"], config: oomb_jax.Config, budgets: Sequence[int]
) -> list[dict[str, Any]]:
    """|Top-K - dense| / |dense| of the gradient, a record for each budget: of all weights, by layer, by kind of weight
    (a number for each layer where the layers have it), with what the step told of its selection."""
    dense, loss = gradient(model, tokens, config)[:2]
    records = []
    for pages in budgets:
        method = dataclasses.replace(config, attention=oomb_jax.TopK(pages=pages))
        grads, sparse_loss, told = gradient(model, tokens, method)
        errors = relative(grads, dense)
        del grads
        records.append(
            {
                "context": len(tokens),
                "pages": pages,
                **errors,
                "loss": sparse_loss,
                "dense_loss": loss,
                **told,
            }
        )
    return records


def relative(grads: Any, exact: Any) -> dict[str, Any]:
    """|grads - exact| / |exact|, in float32: `error` of all weights, `by_layer`, and `by_weight`, where those of layers
    have a number for each layer."""
    difference, norm = squares(jax.tree.map(jnp.subtract, grads, exact)), squares(exact)
    ratio = lambda names: jnp.sqrt(sum(difference[name] for name in names) / sum(norm[name] for name in names))
    whole = [jnp.sum(jnp.stack([jnp.sum(x) for x in sums.values()])) for sums in (difference, norm)]
    return {
        "error": float(jnp.sqrt(whole[0] / whole[1])),
        "by_layer": ratio([name for name in norm if name.startswith("layers.")]).tolist(),
        "by_weight": {name: ratio([name]).tolist() for name in norm},
    }


def gradient(model: Any, tokens: Int[Array, " T"], config: oomb_jax.Config) -> tuple[Any, float, dict[str, float]]:
    """The gradient, the loss, and what the step tells of its selection."""
    pools = oomb_jax.create_pools(model, len(tokens), config)
    labels = jnp.roll(tokens, -1).at[-1].set(-100)
    step = functools.partial(oomb_jax.value_and_grad, config=config)
    step = jax.jit(step, donate_argnums=1, compiler_options=oomb_jax.COMPILER_OPTIONS)
    loss, grads, pools = step(model, pools, tokens, labels)
    told = {}
    if pools.selection is not None and pools.mass is not None:
        told = {name: float(x) for name, x in statistics(pools.selection, pools.mass, config.page).items()}
    return grads, float(loss), told


@jax.jit
def squares(grads: Any) -> Squares:
    """The sum of squares of each weight by name, of those of the layers one for each layer."""
    names, leaves = jax.tree.leaves(parameter_names(grads)), jax.tree.leaves(grads)
    kept = lambda name: 1 if name.startswith("layers.") else 0
    sums = lambda name, x: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(kept(name), x.ndim)))
    return {name: sums(name, x) for name, x in zip(names, leaves, strict=True)}


def tables(records: list[dict[str, Any]]) -> list[Table]:
    """The error by context and budget; and for the longest context by kind of weight, the root of the mean square over
    layers."""
    budgets = sorted({r["pages"] for r in records})
    cell = {(r["context"], r["pages"]): r for r in records}
    contexts = sorted({r["context"] for r in records})
    by_context = Table(
        "context", *(f"{b} pages" for b in budgets), title="relative error of the gradient, Top-K to dense"
    )
    for context in contexts:
        found = (cell.get((context, b)) for b in budgets)
        by_context.add_row(f"{context:,}", *("" if r is None else f"{r['error']:.4f}" for r in found))
    longest = [r for r in records if r["context"] == contexts[-1]]
    longest.sort(key=lambda r: r["pages"])
    by_weight = Table(
        "weight", *(f"{r['pages']} pages" for r in longest), title=f"the same at {contexts[-1]:,} by weight"
    )
    for name in longest[0]["by_weight"]:
        values = (jnp.asarray(r["by_weight"][name]) for r in longest)
        by_weight.add_row(name, *(f"{float(jnp.sqrt(jnp.mean(jnp.square(x)))):.4f}" for x in values))
    return [by_context, by_weight]


def draw(records: list[dict[str, Any]], title: str) -> Figure:
    """Left, the error by budget, a line for each context; right, by layer at the longest, a line for each budget."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    contexts = sorted({r["context"] for r in records})
    shade = lambda i, n: 0.3 + 0.7 * (i + 1) / n
    for i, context in enumerate(contexts):
        line = sorted((r for r in records if r["context"] == context), key=lambda r: r["pages"])
        style = {"color": "#0072B2", "alpha": shade(i, len(contexts)), "marker": "o", "label": f"{context:,} tokens"}
        left.plot([r["pages"] for r in line], [r["error"] for r in line], **style)
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
    left.set_xlabel("pages that a query page chooses")
    longest = sorted((r for r in records if r["context"] == contexts[-1]), key=lambda r: r["pages"])
    for i, r in enumerate(longest):
        style = {"color": "#D55E00", "alpha": shade(i, len(longest)), "marker": "o", "label": f"{r['pages']} pages"}
        right.plot(r["by_layer"], **style)
    right.set_xlabel(f"layer ({contexts[-1]:,} tokens)")
    right.locator_params(axis="x", integer=True)
    for axes in left, right:
        axes.set_ylabel("relative error of the gradient")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure
