"""What a run writes down about itself: a JSON line a step, held-out losses, facts; how memory and FLOP are counted."""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import psutil

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
FACTS = "run.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the summary of a run tells besides its measurements."""

    model: str
    """Name of the model or its directory."""

    parameters: int
    """Number of parameters."""

    context: int
    """Tokens in a sequence."""

    steps: int
    """Optimizer steps that the run was asked for."""

    device: str
    """Kind of device, as in `jax.Device.device_kind`."""

    resume: str
    """The command that continues the run; empty where it saves nothing."""

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes `run.json` in `directory`."""
        write_whole(Path(directory) / FACTS, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "RunFacts | None":
        """Reads `run.json`; None where there is none."""
        path = Path(directory) / FACTS
        return cls(**json.loads(path.read_text())) if path.exists() else None


class MetricsWriter:
    """Appends one JSON line per step to `metrics.jsonl` and one per evaluation to `evaluations.jsonl`.

    Each line is flushed, so that a killed run keeps it. A number that is not finite is written as null with its kind
    beside it, `{"loss": null, "nonfinite": {"loss": "nan"}}`; `read_records` puts it back.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resumed_step: int | None = None,
        tensorboard: bool = False,
        wandb: bool = False,
    ):
        """Opens the files, and the services that are asked for.

        Args:
            directory: the run's directory, made when missing.
            resumed_step: the step that a resumed run starts from; lines of later steps are dropped, and a last line
                torn by a crash too, so that the files tell one history. None starts both files anew.
            tensorboard: write scalars for TensorBoard too, into `directory/tensorboard`.
            wandb: send scalars to Weights & Biases too.

        Raises:
            ValueError: where the package for `tensorboard` or `wandb` is missing, or a file holds a broken line.
        """
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._board = _open_tensorboard(self.directory, resumed_step) if tensorboard else None
        self._wandb = _open_wandb(self.directory, resumed_step) if wandb else None
        for name in (METRICS, EVALUATIONS):
            _truncate(self.directory / name, resumed_step)
        self._metrics = (self.directory / METRICS).open("a", encoding="utf-8")
        self._evaluations = (self.directory / EVALUATIONS).open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the line of `step` (the first step is 1): scalars by name, from Python, numpy or jax."""
        self._append(self._metrics, step, metrics, "train")

    def write_evaluation(
        self,
        step: int,
        *,
        loss: Any,
        position_ends: Sequence[int] = (),
        loss_by_position: Any = (),
    ) -> None:
        """Appends a held-out `loss` measured after `step` optimizer steps.

        `loss_by_position[i]` is the mean loss of positions `position_ends[i-1] <= p < position_ends[i]`, from 0 on.
        """
        by_position = [float(x) for x in np.asarray(loss_by_position)]
        if len(by_position) != len(position_ends):
            raise ValueError(
                f"{len(by_position)} losses by position for {len(position_ends)} position_ends: give one each"
            )
        ends = [int(x) for x in position_ends]
        record = {"loss": loss, "position_ends": ends, "loss_by_position": by_position}
        self._append(self._evaluations, step, record, "evaluation")

    def close(self) -> None:
        """Closes the files and the services."""
        for file in (self._metrics, self._evaluations):
            # Every line was flushed. One that could not be has raised, and would again.
            with contextlib.suppress(OSError):
                file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, file: Any, step: int, values: Mapping[str, Any], prefix: str) -> None:
        values = {name: _plain(value) for name, value in values.items()}
        file.write(_encode({"step": int(step), **values}) + "\n")
        file.flush()
        # A service draws neither a list nor a missing value, and tensorboardX warns of one that is not finite.
        scalars = {
            f"{prefix}/{name}": x for name, x in values.items() if isinstance(x, int | float) and math.isfinite(x)
        }
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None:
            # The step is a value here: evaluations and a resumed run may come back to a step that wandb has closed.
            self._wandb.log({"step": step, **scalars})


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the lines of a `metrics.jsonl` or `evaluations.jsonl`, numbers that are not finite included.

    A last line without its end is left out: it is being written, or a crash cut it. A missing file has no lines.

    Raises:
        ValueError: for a broken line elsewhere.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(_decode(line))
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a record with a step ({error}); delete the line") from None
    return records


def _truncate(path: Path, last_step: int | None) -> None:
    """Keeps the records up to `last_step`, none for None."""
    kept = [] if last_step is None else [record for record in read_records(path) if record["step"] <= last_step]
    write_whole(path, "".join(_encode(record) + "\n" for record in kept))


def write_whole(path: Path, text: str) -> None:
    """Writes a whole file so that a crash leaves either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _plain(value: Any) -> Any:
    """A scalar of numpy or jax as a Python number; anything else as it is."""
    return np.asarray(value).item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value


def _encode(record: Mapping[str, Any]) -> str:
    """One line of strict JSON, which has no NaN and no infinity."""
    nonfinite: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flags = {str(i): str(x) for i, x in enumerate(value) if not math.isfinite(x)}
            values[name] = [None if str(i) in flags else x for i, x in enumerate(value)]
        else:
            flags = str(value) if isinstance(value, float) and not math.isfinite(value) else None
            values[name] = None if flags else value
        if flags:
            nonfinite[name] = flags
    return json.dumps(values | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False)


def _decode(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("no object")
    for name, flags in record.pop("nonfinite", {}).items():
        if isinstance(flags, str):
            record[name] = float(flags)
        else:
            record[name] = [float(flags.get(str(i), x)) for i, x in enumerate(record[name])]
    record["step"] = int(record["step"])
    return record


def _open_tensorboard(directory: Path, resumed_step: int | None) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard=True needs the package tensorboardX: pip install 'oomb_jax[tensorboard]', or leave it off"
        ) from None
    # purge_step hides what a run wrote after the step that it resumes from.
    purge_step = None if resumed_step is None else resumed_step + 1
    return SummaryWriter(logdir=str(directory / "tensorboard"), purge_step=purge_step)


def _open_wandb(directory: Path, resumed_step: int | None) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb=True needs the package wandb: pip install 'oomb_jax[wandb]', or leave it off") from None
    id_file = directory / "wandb-id"
    if resumed_step is None or not id_file.exists():
        id_file.write_text(uuid.uuid4().hex)
    return wandb.init(
        project="oomb_jax",
        name=directory.resolve().name,
        id=id_file.read_text(),
        dir=str(directory),
        resume="allow",
    )


@runtime_checkable
class Device(Protocol):
    """What is asked of a `jax.Device`, which cannot stand in a signature itself."""

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"`, ..."""
        ...

    @property
    def device_kind(self) -> str:
        """The maker's name of the device."""
        ...

    def memory_stats(self) -> dict[str, Any] | None:
        """Figures of the device's allocator."""
        ...


def host_memory() -> int:
    """Bytes of this process in host memory (resident set)."""
    return psutil.Process().memory_info().rss


def device_memory(device: Device) -> dict[str, int] | None:
    """Bytes `in_use` and at the `peak` since the process began on `device`; None where the backend does not tell.

    The CPU backend keeps its arrays in host memory and counts nothing: there these are the process's figures.
    """
    if device.platform == "cpu":
        in_use = host_memory()
        return {"in_use": in_use, "peak": max(in_use, _host_peak())}
    stats = device.memory_stats()
    if not stats:
        return None
    return {"in_use": int(stats["bytes_in_use"]), "peak": int(stats["peak_bytes_in_use"])}


def _host_peak() -> int:
    # VmHWM is of this program alone; ru_maxrss survives exec and may be that of the program that started this one.
    status = Path("/proc/self/status")
    if status.exists() and (line := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(line[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Dense bfloat16 peak with float32 accumulation, FLOP/s, by device kind without the maker's name. After NVIDIA's data
# sheets, not measured (half of the figure "with sparsity" where that is the one printed) and, for the GeForce cards,
# the white papers of the GA102, Ada and RTX Blackwell architectures.
_PEAK_FLOPS = (
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"H100 PCIe", 756e12),
    (r"H(100|200) NVL", 835e12),
    (r"(H100 \d+GB HBM3|H200|GH200 .*)", 989e12),
    (r"A100[- ].*", 312e12),
    (r"A30", 165e12),
    (r"A40", 149.7e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"RTX A6000", 154.8e12),
    (r"GeForce RTX 5090", 209.5e12),
    (r"GeForce RTX 4090", 165.2e12),
    (r"GeForce RTX 4080", 97.5e12),
    (r"GeForce RTX 3090", 71e12),
)


def peak_flops(device: Device) -> float | None:
    """Dense bfloat16 peak of `device` in FLOP/s; None for a CPU, a slice of a GPU (MIG), or a kind not in the table."""
    kind = device.device_kind.removeprefix("NVIDIA ")
    if "MIG" in kind:
        return None
    return next((peak for pattern, peak in _PEAK_FLOPS if re.fullmatch(pattern, kind)), None)


def model_flops(
    *, parameters: int, layers: int, query_heads: int, head_dim: int, tokens: int, attention_share: float = 1.0
) -> float:
    """FLOP that one training step on a causal sequence of T tokens needs: `6 P T + 6 L N H T^2`, of the attention
    part `attention_share`.

    `parameters` P counts those that multiply: a table that only looks tokens up is left out, a tied one counts once, as
    the output head. The count is that of PaLM (arXiv 2204.02311, appendix B), 6P + 12 L N H T per token, its attention
    part halved as the mask leaves out half of the products. What is computed again to save memory does not count.
    """
    return 6.0 * parameters * tokens + 6.0 * layers * query_heads * head_dim * float(tokens) ** 2 * attention_share
