"""How far two sets of gradients lie apart, tensor by tensor."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np
from rich.table import Table

from oomb_jax.compare.files import StoredTensor, open_gradients

BLOCK = 2**22
"""Numbers of a tensor that are read at once: 32 MiB in float64, a few times over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Gradient a of one tensor against gradient b."""

    name: str
    """Hugging Face name."""

    shape: tuple[int, ...]
    """Shape in the files."""

    distance: float
    """|a - b|."""

    relative: float
    """|a - b| / |b|; infinite where only b is 0."""

    cosine: float
    """a·b / (|a| |b|); NaN where one is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two gradient files."""

    differences: tuple[Difference, ...]
    """Tensors of both files, the largest relative error first; NaN before all."""

    only_a: tuple[str, ...]
    """Tensors that b lacks."""

    only_b: tuple[str, ...]
    """Tensors that a lacks."""

    others_a: int
    """Tensors of the file a that are no gradients."""

    others_b: int
    """The same of b."""

    loss_a: float | None
    """Loss stored with a."""

    loss_b: float | None
    """Loss stored with b."""

    @property
    def worst(self) -> Difference:
        """The tensor with the largest relative error."""
        return self.differences[0]

    @property
    def median(self) -> float:
        """Median of the relative errors."""
        errors = np.array([x.relative for x in self.differences])
        return math.nan if np.isnan(errors).any() else float(np.median(errors))

    def json(self) -> str:
        """All of it for a JSON file, which has no NaN and no infinity: null."""
        finite = lambda x: x if math.isfinite(x) else None
        plain = lambda x: {key: finite(value) if isinstance(value, float) else value for key, value in x.items()}
        record = {
            "median": finite(self.median),
            "worst": finite(self.worst.relative),
            "loss_a": self.loss_a,
            "loss_b": self.loss_b,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "tensors": [plain(dataclasses.asdict(x)) for x in self.differences],
        }
        return json.dumps(record, indent=2, allow_nan=False) + "\n"


def compare_gradients(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    prefix_a: str | None = None,
    prefix_b: str | None = None,
) -> Comparison:
    """Compare the gradients a with the gradients b, which errors are relative to.

    Host memory holds a few blocks of one tensor. For the files and prefixes see `oomb_jax.compare.files`.

    Raises:
      ValueError: a file cannot be read, no tensor is in both, or shapes differ.
      ImportError: a `.pth` or `.pt` file without torch.
    """
    with open_gradients(Path(a), prefix_a) as ours, open_gradients(Path(b), prefix_b) as theirs:
        common = [name for name in ours.tensors if name in theirs.tensors]
        if not common:
            raise ValueError(
                f"{a} and {b} have no tensor name in common: {next(iter(ours.tensors))} and "
                f"{next(iter(theirs.tensors))} for example; name what stands before them with --prefix-a, --prefix-b"
            )
        shapes = {name: (ours.tensors[name].shape, theirs.tensors[name].shape) for name in common}
        if faults := [f"{name} {list(x)} and {list(y)}" for name, (x, y) in shapes.items() if x != y]:
            raise ValueError(
                f"{a} and {b} differ in shape: {'; '.join(faults)}. A run with tensor parallelism saves the share "
                "of one GPU: repeat it on one"
            )
        found = [_difference(name, ours.tensors[name], theirs.tensors[name]) for name in common]
        return Comparison(
            differences=tuple(sorted(found, key=lambda x: (not math.isnan(x.relative), -x.relative))),
            only_a=tuple(name for name in ours.tensors if name not in theirs.tensors),
            only_b=tuple(name for name in theirs.tensors if name not in ours.tensors),
            others_a=ours.others,
            others_b=theirs.others,
            loss_a=ours.loss,
            loss_b=theirs.loss,
        )


def table(comparison: Comparison, rows: int) -> Table:
    """The worst tensors, a row each."""
    result = Table("tensor", box=None)
    for column in ("relative error", "cosine", "distance"):
        result.add_column(column, justify="right")
    for x in comparison.differences[:rows]:
        result.add_row(x.name, f"{x.relative:.3e}", f"{x.cosine:.6f}", f"{x.distance:.3e}")
    return result


def summary(comparison: Comparison) -> list[str]:
    """What is not in the table: names that one file lacks, what was left out, losses, the figures of all tensors."""
    lines = []
    for label, names in ("only in A", comparison.only_a), ("only in B", comparison.only_b):
        if names:
            lines.append(f"{label}: {', '.join(names)}")
    for label, count in ("A", comparison.others_a), ("B", comparison.others_b):
        if count:
            lines.append(f"no gradients, left out of {label}: {count}")
    if comparison.loss_a is not None and comparison.loss_b is not None:
        lines.append(f"loss {comparison.loss_a:.6f} in A, {comparison.loss_b:.6f} in B")
    lines.append(
        f"{len(comparison.differences)} tensors: median relative error {comparison.median:.4g}, "
        f"worst {comparison.worst.relative:.4g} ({comparison.worst.name})"
    )
    return lines


def _difference(name: str, a: StoredTensor, b: StoredTensor) -> Difference:
    rows, columns = a.shape[0], math.prod(a.shape[1:])
    step = max(1, BLOCK // max(1, columns))
    sums = np.zeros(4)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        x, y = a.rows(start, stop), b.rows(start, stop)
        sums += np.vdot(x - y, x - y), np.vdot(x, x), np.vdot(y, y), np.vdot(x, y)
    distance, norm_a, norm_b = (math.sqrt(x) for x in sums[:3])
    # A NaN of either side stays one.
    relative = distance / norm_b if norm_b != 0 else 0.0 if distance == 0 else distance * math.inf
    cosine = float(sums[3]) / (norm_a * norm_b) if norm_a * norm_b != 0 else math.nan
    return Difference(name=name, shape=a.shape, distance=distance, relative=relative, cosine=cosine)
