"""Our gradients, settings, speed and memory beside those of the PyTorch implementation of the paper."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from rich.console import Console

from oomb_jax.compare import dump as engine
from oomb_jax.compare import efficiency as speed
from oomb_jax.compare import gradients as measure
from oomb_jax.compare.files import check_out, write_gradients
from oomb_jax.compare.method import method_config
from oomb_jax.config import Config
from oomb_jax.pallas_kernels.paged_attention.api import Implementation
from oomb_jax.selection import TopK

USAGE = 2
"""Exit status of a mistake of the user."""


def gradients(
    a: Annotated[Path, tyro.conf.Positional],
    b: Annotated[Path, tyro.conf.Positional],
    *,
    prefix_a: str | None = None,
    prefix_b: str | None = None,
    rows: int = 20,
    json: Path | None = None,
) -> None:
    """Compare two gradient files tensor by tensor, the worst first.

    Args:
        a: a .safetensors, .pth or .pt file, or a directory of safetensors.
        b: the same; errors are relative to it.
        prefix_a: what stands before the Hugging Face names in A. None: grad. or model. where A has such names.
        prefix_b: the same for B.
        rows: tensors in the table.
        json: write the figures of all tensors to this file.
    """
    comparison = measure.compare_gradients(a, b, prefix_a=prefix_a, prefix_b=prefix_b)
    console = _console()
    console.print(measure.table(comparison, rows))
    for line in measure.summary(comparison):
        console.print(line, markup=False, highlight=False)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(comparison.json(), encoding="utf-8")
        print(f"wrote {json}")


def dump(
    *,
    weights: Path,
    ids: Path,
    out: Path,
    model_config: Path | None = None,
    method: Path | None = None,
    chunk: int | None = None,
    page: int | None = None,
    attention: Literal["dense", "topk"] | None = None,
    pages: int | None = None,
    selection: Path | None = None,
    loss_scale: engine.LossScale = "tokens",
    dtype: Literal["float32", "bfloat16"] = "float32",
    implementation: Implementation | None = None,
) -> None:
    """Write our loss and gradients for given weights and ids, in Hugging Face names and layout.

    Args:
        weights: a Hugging Face directory, or a safetensors file that holds the weights among other tensors.
        ids: a .npy file of token ids, or safetensors with input_ids (and labels, already shifted).
        out: a .safetensors file, or .pth or .pt for the scripts of the PyTorch implementation.
        model_config: the config.json of a weights file. None: that in its metadata or beside it.
        method: a method file of the PyTorch implementation, for chunk, page, attention and pages.
        chunk: tokens of a chunk. None: 4096.
        page: tokens of a page. None: 128.
        attention: what a query attends to. None: dense.
        pages: pages that a query page chooses, with topk. None: 64.
        selection: force the pages that this safetensors file names, in full attention (memory grows with the length
            squared).
        loss_scale: divide the summed loss by all tokens, as the PyTorch implementation does, or by those with a label.
        dtype: of weights and activations; gradients are summed and written in float32.
        implementation: which attention runs; see Config.
    """
    check_out(out)
    # JAX would take three quarters of a GPU and no more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    config = _config(method, chunk, page, attention, pages, implementation)
    model = engine.load_model(weights, model_config, dtype=jnp.dtype(dtype))
    tokens, labels = engine.read_ids(ids, model.config.vocab_size)
    T = len(tokens)
    forced = None
    if selection is not None:
        forced = jnp.asarray(engine.read_selection(selection, model.config.num_hidden_layers, T, config))
    result = engine.gradients(model, tokens, labels, config, selection=forced, loss_scale=loss_scale)
    about = {"T": str(T), "loss_scale": loss_scale, "settings": repr(config)}
    write_gradients(out, result.tensors, result.loss, others=result.selection, metadata=about)
    print(f"loss {result.loss:.6f} of {T:,} tokens; wrote {len(result.tensors)} gradients to {out}")


def config(file: Annotated[Path, tyro.conf.Positional]) -> None:
    """Print the Config that a method file of the PyTorch implementation asks for.

    Args:
        file: its JSON file.
    """
    print(_from_method(file))


def efficiency(
    logs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    *,
    plot: Path | None = None,
) -> None:
    """Print time and memory by context, and the ratios of speed and memory to the first run.

    Args:
        logs: logs of the efficiency test of the PyTorch implementation, and .json files of benchmarks/bench_step.py.
        plot: draw them to this .png file.
    """
    if not logs:
        raise ValueError("logs: name at least one file")
    runs = speed.read_runs(logs)
    _console().print(speed.table(runs))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        speed.draw(runs).savefig(plot, dpi=150)
        print(f"wrote {plot}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status. A mistake of the user is one line."""
    commands = {"gradients": gradients, "dump": dump, "config": config, "efficiency": efficiency}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="python -m oomb_jax.compare", description=__doc__, args=arguments
        )
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    return 0


def _config(
    method: Path | None,
    chunk: int | None,
    page: int | None,
    attention: str | None,
    pages: int | None,
    implementation: Implementation | None,
) -> Config:
    flags = {"chunk": chunk, "page": page, "attention": attention, "pages": pages}
    given = {key: value for key, value in flags.items() if value is not None}
    if method is not None:
        if given:
            raise ValueError(f"method={method} and {', '.join(given)}: the file sets these; name one or the other")
        return dataclasses.replace(_from_method(method), implementation=implementation)
    if pages is not None and attention != "topk":
        raise ValueError(f"pages={pages}: only topk chooses pages; add --attention topk")
    given.pop("pages", None)
    if given.pop("attention", "dense") == "topk":
        given["attention"] = TopK() if pages is None else TopK(pages=pages)
    return Config(**given, implementation=implementation)


def _from_method(file: Path) -> Config:
    result, notes = method_config(file)
    for note in notes:
        print(f"note: {note}")
    return result


def _console() -> Console:
    """As wide as the terminal; a file or pipe gets lines that are not cut."""
    return Console(width=None if sys.stdout.isatty() else 140)


if __name__ == "__main__":
    sys.exit(main())
