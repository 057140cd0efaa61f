"""What a step runs on: rates and memory of GPUs by name, and what this machine has. Nothing here starts JAX."""

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import psutil

GIB = 2**30

SYSTEM, BESIDE_PINNED = 10 * GIB, 0.07
"""Host memory that the system, Python and the libraries take, and what is taken besides for each byte that is pinned.
On one H200 a process with pools of 16 GiB on the host took 22.4, one of 54 took 62.8, one of 220 took 234.1; one of 112
needed more than the 125 that there were, one of 232 more than 251.8. A process that takes more is killed unheard."""

PROCESS, OF_PINNED = 5 * GIB, 0.04
"""Of these what a training process takes, by the same runs and one without pools on the host: 5.0 GiB, and for each
byte that is pinned. The rest goes to the system and the driver."""

SHARE = 0.95
"""Of a GPU's memory that the program lets JAX take (XLA_PYTHON_CLIENT_MEM_FRACTION); the rest is the driver's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as the plan sees it. Rates are those reached within a step, per second; FLOP count 2 for a multiplication
    with its addition, of attention only pairs of a query and a key that it sees."""

    name: str
    memory: float
    """Bytes."""
    matmul: float
    """FLOP, products of the layers."""
    head: float
    """FLOP, products of the output layer with its passes over the logits."""
    attention: tuple[float, float]
    """FLOP, dense, forward (2 products) and backward (5 products)."""
    top_k: tuple[float, float]
    """The same of Top-K attention."""
    memory_rate: float
    """Bytes from and to the GPU's memory, of elementwise passes."""
    link: float
    """Bytes between host and GPU in each direction, both at once."""
    scores: float
    """FLOP, page scores."""
    choice: float
    """Pages of every row of queries that are looked through for the best."""
    beside_movers: float
    """Of the time that pages are under way, what the computation beside them loses: movers hold multiprocessors, and
    may take longer than what hides them."""
    measured: bool = False
    """Whether the rates were measured; else they are those of the H200, scaled by data sheets."""

    @property
    def usable(self) -> int:
        """Bytes that a run may allocate."""
        return int(SHARE * self.memory)


# Measured on one H200 (benchmarks/results/step.json, kernels.json, benchmarks/notes.md): products of qwen2.5-7b 690 to
# 720 TFLOP/s; attention of 4,096 queries over 32,768 keys; scores 0.34 ms and 0.63 ms for a chunk and layer at 16,384
# and 32,768 pages, the choice 0.11 and 0.22; PCIe Gen5 x16 44 GiB/s with copies both ways. With 23 and 28
# seconds of pages beside it a step of 38 took 5 and 8 longer, with the product kernel that leaves movers room; cuBLAS,
# which multiplies on other GPUs, lost half of such time.
_H200 = Device(
    name="h200",
    memory=139.8 * GIB,
    matmul=700e12,
    head=540e12,
    attention=(615e12, 470e12),
    top_k=(555e12, 380e12),
    memory_rate=4.0e12,
    link=44.0 * GIB,
    scores=205e12,
    choice=4.5e9,
    beside_movers=0.3,
    measured=True,
)


def _scaled(
    name: str, *, memory: float, compute: float, bandwidth: float, link: float, beside_movers: float = 0.5
) -> Device:
    """The H200's rates by a data sheet: dense bfloat16 TFLOP/s, TB/s, and GiB/s of the link in each direction."""
    factor = compute / 989
    return Device(
        name=name,
        memory=memory * GIB,
        matmul=_H200.matmul * factor,
        head=_H200.head * factor,
        attention=(_H200.attention[0] * factor, _H200.attention[1] * factor),
        top_k=(_H200.top_k[0] * factor, _H200.top_k[1] * factor),
        memory_rate=_H200.memory_rate * bandwidth / 4.8,
        link=link * GIB,
        scores=_H200.scores * factor,
        choice=_H200.choice * bandwidth / 4.8,
        beside_movers=beside_movers,
    )


# NVIDIA's data sheets: H100 SXM 989 TFLOP/s and 3.35 TB/s, A100 80 GB SXM 312 and 2.04, RTX 4090 165 and 1.01. PCIe
# Gen4 is half of Gen5. Memory is what CUDA reports, less than the name says.
DEVICES = {
    device.name: device
    for device in (
        _H200,
        _scaled("h100", memory=79.1, compute=989.0, bandwidth=3.35, link=44.0, beside_movers=0.3),
        _scaled("a100-80g", memory=79.1, compute=312.0, bandwidth=2.04, link=22.0),
        _scaled("rtx-4090", memory=23.5, compute=165.0, bandwidth=1.01, link=22.0),
    )
}
_NAMES = {r"\bH200\b": "h200", r"\bH100\b": "h100", r"\bA100\b.*80": "a100-80g", r"\bRTX 4090\b": "rtx-4090"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a run is to take place."""

    described: str
    """For people."""
    platform: str
    """`gpu` or `cpu`."""
    device: Device | None
    """Rates; None where they are not known, and no time is told."""
    hbm: int
    """Bytes that a run may allocate on the device. On a CPU, all there are."""
    host: int
    """Bytes of host memory that pools and checkpoints may take; 0 on a CPU, where the two are one."""
    disk: int | None = None
    """Bytes that the checkpoints of a run may take where it writes; None where that is not known."""


def named(name: str, host_memory: int | float | None) -> Machine:
    """A machine with a GPU of `DEVICES` and so many GiB of host memory. None: those of this machine.

    Raises:
      ValueError: no such device.
    """
    if name not in DEVICES:
        raise ValueError(f"device={name!r}: one of {', '.join(DEVICES)}, or `this`")
    device = DEVICES[name]
    total = psutil.virtual_memory().total if host_memory is None else host_memory * GIB
    return Machine(
        described=f"{name}, {device.memory / GIB:.0f} GiB; {total / GIB:.0f} GiB of host memory",
        platform="gpu",
        device=device,
        hbm=device.usable,
        host=for_pools(total),
    )


def this(platform: str = "auto", host_memory: int | float | None = None) -> Machine:
    """This machine, without starting JAX: a GPU is found by the tool of its driver.

    Args:
      platform: `cpu` where the GPU is not to be used.
      host_memory: GiB to count with instead of what is free.
    """
    available = host_available() if host_memory is None else int(host_memory * GIB)
    found = None if platform == "cpu" or not _jax_has_gpu() else _nvidia_smi()
    if found is None:
        return Machine(
            described=f"this CPU, {available / GIB:.0f} GiB of memory free",
            platform="cpu",
            device=None,
            hbm=available,
            host=0,
        )
    name, total, free = found
    known = next((DEVICES[key] for pattern, key in _NAMES.items() if re.search(pattern, name)), None)
    return Machine(
        described=f"{name}, {total / GIB:.0f} GiB; {available / GIB:.0f} GiB of host memory free",
        platform="gpu",
        device=known,
        hbm=min(int(SHARE * total), free),
        host=for_pools(available),
    )


def for_pools(available: int | float) -> int:
    """Of so many bytes of host memory, those that pools and checkpoints may take."""
    return max(0, int((available - SYSTEM) / (1 + BESIDE_PINNED)))


def process(pinned: int) -> int:
    """Bytes of host memory that a training process with a GPU takes beside so many of pools."""
    return int(PROCESS + OF_PINNED * pinned)


def disk_for(directory: Path) -> int:
    """Bytes that files in a directory, which need not be there yet, may take: what is free, and what they take now."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    taken = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return shutil.disk_usage(existing).free + taken


def _jax_has_gpu() -> bool:
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return False
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


def _nvidia_smi() -> tuple[str, int, int] | None:
    """Name, bytes that CUDA has and free bytes of the first GPU; None where there is none, and of a GPU that shares the
    host's memory, of which the tool tells none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.used,memory.free", "--format=csv,noheader,nounits"]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        query.append(f"--id={visible.split(',')[0]}")
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return None
    name, used, free = lines[0].rsplit(",", 2)
    if used.strip() == "[N/A]":
        return None
    # What the tool calls the total has some 0.6 GiB more, which the driver keeps.
    return name.strip(), (int(used) + int(free)) * 2**20, int(free) * 2**20


def host_available(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory that this process may still take: what is free, and what the limits of its control groups
    (containers, batch systems; versions 1 and 2) leave."""
    return min([psutil.virtual_memory().available, *_limits(root, groups)])


def _limits(root: Path, groups: Path) -> list[int]:
    """What each memory limit above this process leaves. Cached files do not count, the kernel drops them."""
    lines = groups.read_text().splitlines() if groups.exists() else []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, limit, usage, cache = (
            (root, "memory.max", "memory.current", "inactive_file")
            if controllers == ""
            else (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        # In a container the groups above are not to be seen, and its own may be the root.
        path = base / name.lstrip("/")
        for directory in (path, *path.parents):
            if not directory.is_relative_to(base):
                break
            try:
                most = (directory / limit).read_text().strip()
                if most == "max":
                    continue
                used = int((directory / usage).read_text())
                files = re.search(rf"^{cache} (\d+)$", (directory / "memory.stat").read_text(), re.MULTILINE)
            except OSError:
                continue
            found.append(max(0, int(most) - used + (int(files[1]) if files else 0)))
    return found
