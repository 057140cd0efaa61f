"""Bytes of a training step by kind, in the GPU's memory and on the host, from shapes alone.

Weights, gradients, optimizer, pools and saved activations are exact: shapes that the step itself has. `scratch` is what
XLA keeps beside them while one layer or the head is computed; its terms are named after the buffers of XLA's assignment
for an H200, and tests/aot compares the sums with what the compiler reports.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from oomb_jax.chunked import _remat
from oomb_jax.config import Config
from oomb_jax.pallas_kernels.linear_cross_entropy.api import TILE_LOGITS
from oomb_jax.pallas_kernels.page_move.api import FLOAT8
from oomb_jax.parts import layer_at, layer_count, split
from oomb_jax.sequence import chunk_count, chunk_length, top_k
from oomb_jax.shapes import accumulator, divisor

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "kv",
    "kv_gradients",
    "selection",
    "tokens",
    "representatives",
    "activations",
    "staging",
    "scratch",
)
"""Kinds of memory on the device."""

REFERENCE_SCORES = {True: 2**20, False: 2**26}
"""Scores of a block of the reference attention, on a CPU and on a GPU."""

MASS_SCORES = 2**26
"""Bytes of a block of scores of `selection.attention_mass`."""


SAVED_WHOLE = 2 * 2**30
"""Bytes of model and optimizer up to which a checkpoint copies them to the host at once; else array by array."""

SAVED_BESIDE = 2**20
"""Bytes of a checkpoint beside its arrays: metadata of a few thousand."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training step to be planned."""

    model: Any
    """Shapes of the model."""
    config: Config
    """With `hbm_layers`."""
    ctx: int
    batch: int = 1
    packed: bool = False
    """Whether documents of a sequence are kept apart."""
    optimizer: Any = ()
    """Shapes of the optimizer's state."""
    cpu: bool = False
    """Whether it runs on a CPU."""
    checkpoints: bool = False
    """Whether model and optimizer are saved, by way of the host."""

    @property
    def chunk(self) -> int:
        """C."""
        return chunk_length(self.ctx, self.config)

    @property
    def chunks(self) -> int:
        """n."""
        return chunk_count(self.ctx, self.config)

    @property
    def pages(self) -> int:
        """P."""
        return self.chunks * self.chunk // self.config.page

    @property
    def host_layers(self) -> int:
        """Layers whose pools are in host memory."""
        resident, L = self.config.hbm_layers, layer_count(self.model.layers)
        return 0 if resident is None else max(0, L - resident)

    @property
    def float8(self) -> bool:
        """Whether keys and values are kept in float8."""
        return self.config.kv_dtype == FLOAT8

    @property
    def staged_layers(self) -> int:
        """Layers whose pages are fetched: those on the host, and in float8 all."""
        return layer_count(self.model.layers) if self.float8 else self.host_layers

    @functools.cached_property
    def shapes(self) -> "Shapes":
        """Of a chunk of it."""
        return shapes(self.model, self.config, self.chunk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What a chunk of C tokens has in one layer, and at the two ends."""

    saved: tuple[jax.ShapeDtypeStruct, ...]
    """What the recomputed forward pass of a layer keeps for its backward pass, as `chunked._Saved` does."""
    h: jax.ShapeDtypeStruct
    q: jax.ShapeDtypeStruct
    k: jax.ShapeDtypeStruct
    widest: int
    """Bytes of the widest intermediate result of a layer."""
    layer: tuple[jax.ShapeDtypeStruct, ...]
    """Parameters of a layer."""
    head: jax.ShapeDtypeStruct
    """The matrix of the output layer."""
    tied: bool
    """Whether that is also the embedding's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes by kind. A kind that grows and goes within the step is counted in the phases that hold it."""

    phases: dict[str, dict[str, int]]
    """By phase (fill, reverse, update), on the device."""
    host: dict[str, int]
    checkpoint: int
    """Bytes of one on the disk; 0 where none is saved."""

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes on the device in each phase."""
        return {phase: sum(kinds.values()) for phase, kinds in self.phases.items()}

    @property
    def hbm(self) -> dict[str, int]:
        """The most of each kind; `total` is the phase that holds most, less than their sum."""
        most = {kind: max(kinds[kind] for kinds in self.phases.values()) for kind in KINDS}
        return most | {"total": max(self.peaks.values())}


def account(job: Job) -> Bytes:
    """Bytes of a step."""
    config, s = job.config, job.shapes
    L, P, away = layer_count(job.model.layers), job.pages, job.host_layers
    _, M, H = s.k.shape
    attention = top_k(job.ctx, config)
    per_layer = 2 * P * M * config.page * H
    kv = per_layer * itemsize(config.kv_dtype, s.k.dtype)
    kv_gradients = per_layer * itemsize(config.kv_grad_dtype, accumulator(s.k.dtype))
    room = P if config.kv_grad_pages is None else min(P, config.kv_grad_pages)
    staged_gradients = kv_gradients // P * room
    slots = 4 * (P if room == P else P + room + 1)
    selection = representatives = 0
    if attention is not None:
        rows = P * (M if attention.scope == "kv_head" else 1)
        selection = 4 * rows * L * attention.pages + 8 * L
        representatives = L * P * M * H * s.k.dtype.itemsize
    always = {
        "weights": tree_bytes(job.model),
        "gradients": gradient_bytes(job.model, config),
        "optimizer": tree_bytes(job.optimizer),
        "kv": (L - away) * kv + (L * 2 * 4 * P * M if job.float8 else 0),  # with the scales of all layers
        # With what tells where the gradients of staged layers lie.
        "kv_gradients": (L - away) * (staged_gradients if job.float8 else kv_gradients) + job.staged_layers * slots,
        "selection": selection,
        # The labels of the batch, and one sequence's tokens, labels and length, with segments their ids and positions.
        "tokens": 4 * (job.batch * job.ctx + (4 if job.packed else 2) * job.chunks * job.chunk + 1),
    }
    staged = 2 * staging_slots(job) * M * config.page * H if job.staged_layers else 0
    fetched = staged * (2 if job.float8 else itemsize(config.kv_dtype, s.k.dtype))  # float8 is widened to bfloat16
    added = staged * accumulator(s.k.dtype).itemsize
    phase = lambda **kinds: {kind: kinds.get(kind, always.get(kind, 0)) for kind in KINDS}
    phases = {
        # Of two chunks one computes while the pages of the other arrive.
        "fill": phase(representatives=representatives, staging=2 * fetched, scratch=_fill_scratch(job)),
        # The pages of the next layer arrive while one is computed; a layer's gradients are added before the next.
        "reverse": phase(
            activations=L * tree_bytes(s.saved), staging=2 * fetched + added, scratch=_reverse_scratch(job)
        ),
        # The update goes element by element, in place.
        "update": phase(),
    }
    host = {
        "kv": away * kv,
        "kv_gradients": away * staged_gradients,
        "checkpoint": _copied(job) if job.checkpoints else 0,
    }
    saved = always["weights"] + always["optimizer"] + SAVED_BESIDE if job.checkpoints else 0
    return Bytes(phases=phases, host=host | {"total": sum(host.values())}, checkpoint=saved)


def _copied(job: Job) -> int:
    """The most that a checkpoint takes on its way to the disk: everything, or of much the largest array."""
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves((job.model, job.optimizer))]
    return sum(sizes) if sum(sizes) <= SAVED_WHOLE else max(sizes)


def staging_slots(job: Job) -> int:
    """U, pages that the staging buffer of a layer has room for: as many as a chunk's table has entries."""
    attention = top_k(job.ctx, job.config)
    if attention is None:
        return job.pages
    heads = job.shapes.k.shape[1] if attention.scope == "kv_head" else 1
    return min(job.pages, job.chunk // job.config.page * heads * attention.pages)


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def gradient_bytes(parameters: Any, config: Config) -> int:
    """Bytes of the sums of gradients of some parameters."""
    return sum(x.size * itemsize(config.grad_dtype, accumulator(x.dtype)) for x in jax.tree.leaves(parameters))


def itemsize(chosen: DTypeLike | None, otherwise: DTypeLike) -> int:
    """Bytes of a number of the chosen dtype, or where none is, of the other."""
    return jnp.dtype(otherwise if chosen is None else chosen).itemsize


@functools.lru_cache(maxsize=64)
def _shapes(leaves: tuple, treedef: Any, remat: Config, C: int) -> Shapes:
    model = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])

    def layer(model, tokens, positions, config):
        # The two parts of `chunked._layers_recompute`; what attention keeps, it returns.
        remat, h = _remat(config), model.embed(tokens)
        one = layer_at(model.layers, 0)
        inputs = remat(lambda layer, h: layer.attention_inputs(h, positions))
        (q, k, v), inputs_vjp = jax.vjp(inputs, one, h, saveable_args=False)
        output = remat(lambda layer, h, o: layer.attention_output(h, o))
        _, output_vjp = jax.vjp(output, one, h, q, saveable_args=False)
        lse = jnp.zeros((q.shape[1], C), accumulator(q.dtype))
        return (h, inputs_vjp, q, k, v, q, lse, output_vjp), one, model.head(h)[1]

    ids = jax.ShapeDtypeStruct((C,), jnp.int32)
    saved, one, head = jax.eval_shape(functools.partial(layer, config=remat), model, ids, ids)
    everything, *_ = jax.eval_shape(functools.partial(layer, config=Config(remat="none")), model, ids, ids)
    outer = jax.tree.leaves(split(model)[0])
    h, _, q, k, *_ = saved
    return Shapes(
        saved=tuple(jax.tree.leaves(saved)),
        h=h,
        q=q,
        k=k,
        widest=max(tree_bytes(x) for x in jax.tree.leaves(everything)),
        layer=tuple(jax.tree.leaves(one)),
        head=head,
        tied=sum(x.size >= head.size for x in outer) < 2,
    )


def shapes(model: Any, config: Config, C: int) -> Shapes:
    """Shapes of a chunk of C tokens."""
    leaves, treedef = jax.tree.flatten(model)
    return _shapes(tuple((x.shape, x.dtype) for x in leaves), treedef, Config(remat=config.remat), C)


def _fill_scratch(job: Job) -> int:
    """The most of two moments of a layer: its feed-forward block (up, gate and their product, beside h, its norm and
    queries), and its attention or choice of pages."""
    s = job.shapes
    hidden = tree_bytes(s.h)
    return max(3 * s.widest + 3 * hidden, 3 * hidden + _choice_scratch(job), 2 * hidden + _attention_scratch(job, 3))


def _reverse_scratch(job: Job) -> int:
    """The most of four moments: a tile of logits in the head, a layer backward and its attention, the gradient of the
    embedding."""
    config, s = job.config, job.shapes
    V, C = s.head.shape[1], job.chunk
    wide = accumulator(s.h.dtype).itemsize
    hidden, width = tree_bytes(s.h), s.head.dtype.itemsize
    # Logits, and their gradient as the matrix products read it. Of a head tied to the embedding, the matrix turned.
    head = divisor(C, max(1, TILE_LOGITS // V)) * V * (wide + width) + 4 * hidden
    if s.tied:
        head += tree_bytes(s.head)
    # Of the feed-forward block the product and three gradients; recomputed with `full`, up and gate too.
    backward = {"none": 4, "dots": 4, "full": 6}[config.remat] * s.widest + 5 * hidden
    if any(itemsize(config.grad_dtype, accumulator(x.dtype)) != x.dtype.itemsize for x in s.layer):
        # Sums of another dtype than the products' results are added apart: one layer of them, and a matrix to be added.
        backward += gradient_bytes(s.layer, config)
        backward += max(map(tree_bytes, s.layer))
    attention = 5 * hidden + _attention_scratch(job, 6)
    # The embedding's gradient comes last, in the place of the activations.
    embedding = s.head.size * wide - layer_count(job.model.layers) * tree_bytes(s.saved)
    return max(head, backward, attention, embedding)


def _choice_scratch(job: Job) -> int:
    """Page scores, what they are sorted by, and the blocks of scores of `attention_mass`."""
    if top_k(job.ctx, job.config) is None:
        return 0
    rows = job.chunk // job.config.page * job.shapes.k.shape[1]
    return 4 * 4 * rows * job.pages + 2 * MASS_SCORES


def _attention_scratch(job: Job, arrays: int) -> int:
    """Of attention in plain JAX: three blocks of scores, and queries, results and their gradients in float32. The
    kernels take none."""
    if not job.cpu and job.config.implementation != "reference":
        return 0
    q, wide = job.shapes.q, accumulator(job.shapes.q.dtype).itemsize
    block = min(REFERENCE_SCORES[job.cpu], q.shape[1] * job.chunk * job.pages * job.config.page)
    return wide * (3 * block + arrays * q.size)
