"""Seconds of a training step by phase, from FLOP, bytes and the rates of a device."""

import dataclasses

from oomb_jax.parts import layer_count
from oomb_jax.plan.machine import Device
from oomb_jax.plan.memory import Job, gradient_bytes, itemsize, tree_bytes
from oomb_jax.selection import TopK
from oomb_jax.sequence import top_k
from oomb_jax.shapes import accumulator

# What norms, activations and sums read and write beside matrix products, in units of a layer's widest result. Fitted to
# the breakdown of a measured step at 16,384 tokens (benchmarks/results/step.json): 7 ms forward and 26 ms backward of a
# chunk of qwen2.5-7b.
FORWARD_PASSES, BACKWARD_PASSES = 7, 24

NARROW_HEADS = 0.72
"""Of the rates of attention, which are those of heads of 128, what narrower ones reach: a step of qwen2.5-0.5b with
heads of 64 at 131,072 tokens took 9.75 s (benchmarks/results/qwen2.5-0.5b-128k-h200)."""

FULL_SHARE = 0.65
"""Of a layer's products, those that `remat="full"` computes again: all but the first and the last ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one step with one sequence after the other, by phase."""

    phases: dict[str, float]
    """fill, recompute, head, backward, optimizer, and `pages`: what those of the host add, where nothing hides them or
    their movers hold up what does."""
    moved: dict[str, float]
    """Bytes over the link, `to_device` and `to_host`."""
    flops: float
    distinct: float
    """Pages that one layer and chunk fetches, mean over chunks; 0 where nothing is on the host."""

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.phases.values())


def estimate(job: Job, device: Device, distinct: float | None = None) -> Seconds:
    """Seconds of a step.

    Args:
      job: the step.
      device: its rates.
      distinct: distinct pages that a chunk chooses in a layer, with Top-K. None: as if every page of queries chose at
        random, which is the most; text chooses fewer.
    """
    config, s, L, n, C = job.config, job.shapes, layer_count(job.model.layers), job.chunks, job.chunk
    attention = top_k(job.ctx, config)
    N, H = s.q.shape[1:]
    # A model's matrices are what has two axes in a layer; norms and biases do not count.
    matrices = sum(x.size for x in s.layer if len(x.shape) >= 2)
    layer = 2 * matrices * C / device.matmul
    filled = n - (attention is None)
    elementwise = s.widest / device.memory_rate
    # The last layer of the fill pass stops at its keys and values.
    fill = filled * (L - 1) * (layer + FORWARD_PASSES * elementwise)
    recompute = n * L * (layer + FORWARD_PASSES * elementwise)
    backward = n * L * ((2 + FULL_SHARE * (config.remat == "full")) * layer + BACKWARD_PASSES * elementwise)
    # A chunk reads and writes the sums of all layers' gradients, and writes and reads its share.
    backward += n * L * 2 * (gradient_bytes(s.layer, config) + tree_bytes(s.layer)) / device.memory_rate
    head = n * 6 * s.head.size * C / device.head
    pairs = sum(_pairs(job, attention, c) for c in range(n))
    rates = device.attention if attention is None else device.top_k
    forward_rate, backward_rate = (rate * (1 if H >= 128 else NARROW_HEADS) for rate in rates)
    product = 2 * N * H * pairs
    in_fill = pairs - (_pairs(job, attention, n - 1) if attention is None else 0)
    fill += (L - 1) * 2 * 2 * N * H * in_fill / forward_rate + _choosing(job, attention, device)
    recompute += L * 2 * product / forward_rate
    backward += L * 5 * product / backward_rate
    # The update reads the gradients twice, for their norm first, and reads and writes the rest.
    updated = tree_bytes(job.model) + gradient_bytes(job.model, config) + tree_bytes(job.optimizer)
    optimizer = 2 * updated / device.memory_rate
    pages, moved = _moved(job, attention, distinct)
    compute = {"fill": fill, "recompute": recompute, "head": head, "backward": backward}
    added = 0.0
    for phase, ways in moved.items():
        under_way, hides = max(ways.values()) / device.link, compute[phase] * (job.host_layers / L)
        added += max(0.0, under_way - hides) + device.beside_movers * min(under_way, hides)
    phases = {name: job.batch * value for name, value in (compute | {"pages": added}).items()}
    total = {way: job.batch * sum(part[way] for part in moved.values()) for way in ("to_device", "to_host")}
    flops = job.batch * (8 * L * matrices * C * n + 6 * s.head.size * C * n + L * 9 * product)
    return Seconds(phases=phases | {"optimizer": optimizer}, moved=total, flops=flops, distinct=pages)


def _pairs(job: Job, attention: TopK | None, c: int) -> float:
    """Pairs of a query of chunk c and a key that it sees."""
    C, page = job.chunk, job.config.page
    earlier = c * C if attention is None else min(c * C, attention.pages * page)
    return C * (earlier + (C + 1) / 2)


def _choosing(job: Job, attention: TopK | None, device: Device) -> float:
    """Scores and choice of all chunks and layers."""
    if attention is None:
        return 0.0
    s, rows = job.shapes, job.chunk // job.config.page
    _, M, H = s.k.shape
    scores = 2 * job.chunk * M * H * job.pages / device.scores
    choice = rows * job.pages * (M if attention.scope == "kv_head" else 1) / device.choice
    return job.chunks * layer_count(job.model.layers) * (scores + choice)


def _moved(job: Job, attention: TopK | None, distinct: float | None) -> tuple[float, dict[str, dict[str, float]]]:
    """Mean pages of a chunk and layer that are fetched, and bytes over the link by phase and direction."""
    away, (_, M, H), config = job.host_layers, job.shapes.k.shape, job.config
    phases = {name: {"to_device": 0.0, "to_host": 0.0} for name in ("fill", "recompute", "backward")}
    if not away:
        return 0.0, phases
    elements = 2 * M * config.page * H
    page = elements * itemsize(config.kv_dtype, job.shapes.k.dtype)
    gradient = elements * itemsize(config.kv_grad_dtype, accumulator(job.shapes.k.dtype))
    rows = job.chunk // config.page

    def chosen(c: int, chunks: int = 1) -> float:
        """Distinct pages of chunk c, or of so many chunks from c on."""
        earlier = float((c + chunks - 1) * rows)
        if attention is None or not earlier:
            return earlier
        if distinct is not None:  # how many of them are the same is not known
            return sum(min(distinct, float(i * rows)) for i in range(c, c + chunks))
        return earlier * (1 - (1 - min(earlier, attention.pages) / earlier) ** (chunks * rows))

    fetched = sum(map(chosen, range(job.chunks)))
    # Of two chunks that the fill pass takes in turns, the second copies what the first has fetched, unless that was
    # widened.
    filled = fetched
    if page == elements * itemsize(None, job.shapes.k.dtype):
        filled = sum(chosen(c, min(2, job.chunks - c)) for c in range(0, job.chunks, 2))
    own = job.chunks * rows
    phases["fill"] = {"to_device": away * filled * page, "to_host": away * own * page}
    phases["recompute"] = {"to_device": away * fetched * page, "to_host": 0.0}
    # Gradient pages are read, added to and written; the chunk's own are read.
    phases["backward"] = {
        "to_device": away * (fetched * (page + gradient) + own * gradient),
        "to_host": away * fetched * gradient,
    }
    return fetched / job.chunks, phases
