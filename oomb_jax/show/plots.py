"""The pictures of a selection."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:  # matplotlib takes half a second to import: only where something is drawn
    from matplotlib.figure import Figure

CELLS = 400
"""Most cells along a side of a picture; about the pixels that a panel has."""

OWN, BLUES, LINE, GREY = "#f4c7a1", ("#c3dff0", "#0072B2", "#00263d"), "#0072B2", "#6b6b6b"


def density(table: Int[np.ndarray, "n R M K"], cell: int, cells: int) -> Float[np.ndarray, "cells cells"]:
    """The share of the pairs of a query page and a key page in each cell that are chosen, by `cell` pages a side."""
    n, R, M, _ = table.shape
    chosen = table >= 0
    rows = np.broadcast_to(np.arange(n * R).reshape(n, R, 1, 1), table.shape)[chosen] // cell
    counts = np.bincount(rows * cells + table[chosen] // cell, minlength=cells**2).reshape(cells, cells)
    size = np.minimum(cell, n * R - np.arange(cells) * cell)
    return counts / (M * size[:, None] * size[None])


def draw_choice(tables: Int[np.ndarray, "n L R M K"], query_pages: int, title: str, path: Path) -> Path:
    """Query pages down, key pages to the right, a panel for each layer; the own chunks are shaded."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure

    n, L, R, M, _ = tables.shape
    cell = -(-n * R // CELLS)
    cells = -(-n * R // cell)
    panels = [density(tables[:, l], cell, cells) for l in range(L)]
    columns = min(L, max(2, round(math.sqrt(1.3 * L))))
    rows = -(-L // columns)
    shares = cell > 1 or M > 1  # else every cell is chosen or not
    width = 2.9 * columns + (1.2 if shares else 0.3)
    figure = Figure(figsize=(width, 3.0 * rows + 0.7), layout="constrained")
    # One scale for all; most cells of a long sequence hold few of many pages, which a linear scale would not show.
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(np.max(panels)), 1e-9))
    style: dict[str, Any] = {
        "norm": norm,
        "cmap": LinearSegmentedColormap.from_list("blues", BLUES),
        "interpolation": "nearest",
    }
    image, ends = None, np.arange(n + 1) * R
    for l, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        if l >= L:
            axes.axis("off")
            continue
        shown = np.ma.masked_equal(panels[l], 0)
        extent = (0, cells * cell, cells * cell, 0)
        axes.fill_betweenx(ends, ends, ends + R, step="post", color=OWN, linewidth=0, zorder=1)
        image = axes.imshow(shown, extent=extent, zorder=2, **style)
        axes.plot([0, n * R], [0, n * R], color=GREY, linewidth=0.5, zorder=1)
        axes.set(xlim=(0, query_pages), ylim=(query_pages, 0))
        axes.set_title(f"layer {l}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.locator_params(nbins=5, integer=True)
    figure.supxlabel("key page", fontsize=9)
    figure.supylabel("query page", fontsize=9)
    title += "; the own chunk is shaded"
    if shares:
        assert image is not None
        bar = figure.colorbar(image, ax=figure.axes, shrink=min(1.0, 1.4 / rows), aspect=25)
        heads = f", mean of {M} key/value heads" if M > 1 else ""
        bar.set_label(f"chosen share of a cell of {cell} x {cell} pages{heads}", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return _save(figure, title, path)


def draw_recall(
    recall: dict[int, Float[np.ndarray, " L"]],
    tables: Int[np.ndarray, "n L R M K"],
    chunk: int,
    title: str,
    path: Path,
) -> Path:
    """Recall by layer: a line for each measured chunk, and what as many pages would hold were all alike."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    _, L, R, _, _ = tables.shape
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    layers = np.arange(L)
    for i, (c, values) in enumerate(sorted(recall.items())):
        shade = 0.35 + 0.65 * (i + 1) / len(recall)
        label = f"tokens {c * chunk:,} to {(c + 1) * chunk:,}"
        axes.plot(layers, values, color=LINE, alpha=shade, marker="o", markersize=3.5, linewidth=1.5, label=label)
        alike = np.mean(np.sum(tables[c] >= 0, axis=-1), axis=(-2, -1)) / (c * R)
        style: dict[str, Any] = {"label": "as many pages, were all alike"} if i == len(recall) - 1 else {}
        axes.plot(layers, alike, color=GREY, alpha=shade, linestyle="--", linewidth=1.2, **style)
    axes.set(
        xlabel="layer",
        ylabel="recall: share of distant attention\non the chosen pages",
        ylim=(0, 1.03),
        xlim=(-0.3, L - 0.7),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return _save(figure, title, path)


def _save(figure: "Figure", title: str, path: Path) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.suptitle(title, fontsize=11)
    temporary = path.with_name(path.name + ".tmp")
    FigureCanvasAgg(figure).print_figure(temporary, format="png", dpi=150)
    temporary.replace(path)
    return path
