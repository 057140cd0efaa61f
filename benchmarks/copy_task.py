"""Does distant context count? Copying at a distance, with dense attention, Top-K, the own chunk alone and random pages.

    python benchmarks/copy_task.py dense          # trains; run it again to go on from where it stopped
    python benchmarks/copy_task.py topk           # from here on: fine-tunes what `dense` saved, and measures it
    python benchmarks/copy_task.py chunk
    python benchmarks/copy_task.py random
    python benchmarks/copy_task.py table

The second half of a sequence repeats the first, whose tokens are random and all different, so the one place that tells
the next token lies half a sequence back, far outside the own chunk. A model of two layers can solve this: the first
looks at the token before, the second finds the place where that pair was seen. It is trained with dense attention on
short distances first; a distance that is solved is doubled, until it is half of `--ctx`. Shorter copies share a
sequence as documents that do not attend to each other.

A token counts as right where the model gives it more than half of the probability. On two CPU cores, and on an H200:

    python benchmarks/copy_task.py dense --ctx 1024 --chunk 128 --page 16 --block 2048 --out runs/copy-small
    python benchmarks/copy_task.py dense --block 32768 --dtype bfloat16
"""

import dataclasses
import datetime
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Int
from rich.console import Console
from rich.table import Table
from selections import Choice, forced

import oomb_jax
from oomb_jax import models

Stage = Literal["dense", "topk", "chunk", "random", "table"]
CHOICES: dict[Stage, Choice] = {"dense": "model", "topk": "model", "chunk": "none", "random": "random"}
SOLVED = 0.98
"""Accuracy on a batch at which the distance doubles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Copying at a distance."""

    stage: tyro.conf.Positional[Stage]
    """`dense` trains and saves; `topk`, `chunk` and `random` fine-tune that; `table` prints what was measured."""

    ctx: int = 65536
    """Tokens of a sequence; copies are half of that apart."""

    chunk: int = 4096
    """Tokens of a chunk."""

    page: int = 128
    """Tokens of a page."""

    pages: int | None = None
    """Pages that a query page chooses. None: an eighth of the sequence's."""

    block: int = 8192
    """Tokens of a step while copies are shorter than half of it."""

    steps: int = 4000
    """Steps of `dense` at most; it ends when the last distance is solved."""

    tuning: int = 150
    """Steps of fine-tuning."""

    learning_rate: float = 2e-3
    """Of `dense`; half of it when fine-tuning."""

    width: int = 128
    """Width of the model, two heads of half of it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the computation; the weights that are trained are float32."""

    implementation: Literal["mosaic", "triton", "reference"] | None = None
    """Which attention runs. None: the engine's choice."""

    seed: int = 0
    """Of the weights and the tokens."""

    out: Path = Path("runs/copy")
    """Where the models and the figures are kept."""

    def __post_init__(self):
        if self.ctx % (2 * self.chunk) or self.ctx & (self.ctx - 1):
            raise ValueError(f"ctx={self.ctx}: a power of two, and twice as long as chunk={self.chunk} or more")

    @property
    def distance(self) -> int:
        """Tokens from a token to its copy in the end."""
        return self.ctx // 2

    @property
    def budget(self) -> int:
        """Pages that a query page chooses."""
        return self.pages or self.ctx // self.page // 8

    @property
    def vocabulary(self) -> int:
        """Different tokens: enough for half a sequence."""
        return max(self.distance, 256)

    def method(self, stage: Stage) -> oomb_jax.Config:
        """How the engine attends."""
        attention = oomb_jax.TopK(pages=self.budget)
        return oomb_jax.Config(
            chunk=self.chunk,
            page=self.page,
            attention=oomb_jax.Dense() if stage == "dense" else attention,
            implementation=self.implementation,
        )


def new_model(settings: Settings) -> models.Qwen2:
    """Two layers and an embedding that the head shares: a token is copied by copying its row. Random weights are small:
    with rows of length one the model did not find out how to copy in twice as many steps."""
    sizes = models.ModelConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=2 * settings.width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=settings.width // 2,
        # Half of a head's dimensions hardly turn over the longest distance, so content can be found anywhere.
        rope=models.Rope(theta=1e8, max_position_embeddings=settings.ctx),
        tie_word_embeddings=True,
    )
    return models.create(sizes, key=jax.random.key(settings.seed), dtype=jnp.float32)


class Batch(NamedTuple):
    """Rows of one step."""

    tokens: Int[Array, "B T"]
    labels: Int[Array, "B T"]
    segments: Int[Array, "B T"]


def batch(settings: Settings, distance: int, rng: np.random.Generator, *, exact: bool = False) -> Batch:
    """Rows of a step: documents whose second half repeats the first, from `distance / 2` to `distance` tokens later.

    Were all equally far apart, the model would learn the distance instead of looking for the copy. `exact`: they are.
    """
    length = max(2 * distance, min(settings.block, settings.ctx))
    rows = []
    for _ in range(max(1, settings.block // length)):
        tokens, labels, segments = [], [], []
        while left := length - len(tokens):
            half = min(distance if exact else int(rng.integers(distance // 2, distance + 1)), left // 2)
            first = rng.permutation(settings.vocabulary)[:half].tolist()
            tokens += [*first, *first]
            # The first half is random, and nothing follows the second.
            labels += [*[-100] * half, *first[1:], -100]
            segments += [segments[-1] + 1 if segments else 0] * (2 * half)
        rows.append((tokens, labels, segments))
    return Batch(*(jnp.asarray(x, jnp.int32) for x in zip(*rows, strict=True)))


class Machine:
    """The compiled steps of one way to attend; a new length of the sequence compiles again."""

    def __init__(self, settings: Settings, stage: Stage, optimizer: optax.GradientTransformation):
        """Nothing is compiled yet."""
        self.settings, self.config = settings, settings.method(stage)
        self.choice: Choice = CHOICES[stage]
        self.optimizer = optimizer
        self.pools: Any = None
        jit = functools.partial(jax.jit, donate_argnames="pools", compiler_options=oomb_jax.COMPILER_OPTIONS)
        narrow = lambda model: jax.tree.map(lambda x: x.astype(settings.dtype), model)
        gradient = functools.partial(oomb_jax.value_and_grad, config=self.config)
        losses = functools.partial(oomb_jax.token_losses, config=self.config)

        @jit
        def step(model, state, pools, batch):
            loss, grads, pools = gradient(narrow(model), pools, batch.tokens, batch.labels, segments=batch.segments)
            updates, state = self.optimizer.update(grads, state, model)
            return optax.apply_updates(model, updates), state, loss, pools

        @jit
        def right(model, pools, batch):
            loss, pools = losses(narrow(model), pools, batch.tokens, batch.labels, segments=batch.segments)
            counts = batch.labels >= 0
            return jnp.sum((loss < math.log(2)) & counts) / jnp.sum(counts), pools

        self._step, self._right = step, right

    def step(self, model: Any, state: Any, batch: Batch) -> tuple[Any, Any, float]:
        """One step of training: model, optimizer's state, loss."""
        with forced(self.choice):
            model, state, loss, self.pools = self._step(model, state, self._pools(model, batch), batch)
        return model, state, float(loss)

    def accuracy(self, model: Any, batch: Batch) -> float:
        """Share of the copied tokens that the model knows."""
        with forced(self.choice):
            right, self.pools = self._right(model, self._pools(model, batch), batch)
        return float(right)

    def _pools(self, model: Any, batch: Batch) -> Any:
        length = batch.tokens.shape[1]
        if self.pools is None or self.pools.pages * self.settings.page != length:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self.settings.dtype), model)
            self.pools = oomb_jax.create_pools(shapes, length, self.config)
        return self.pools


def adam(rate: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer, with clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01))


def train_dense(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """From random weights, or from what an earlier run saved, to copies half a sequence apart."""
    directory, progress = settings.out / "dense", settings.out / "dense.json"
    if progress.exists():
        done = json.loads(progress.read_text(encoding="utf-8"))
        model = models.load(directory)
        say(f"goes on from step {done['steps']}, distance {done['distance']}")
    else:
        done = {"steps": 0, "distance": 16}
        model = new_model(settings)
    optimizer = adam(optax.warmup_constant_schedule(0.0, settings.learning_rate, 50))
    machine, state = Machine(settings, "dense", optimizer), jax.jit(optimizer.init)(model)
    begun = time.perf_counter()

    def save():
        models.save(model, directory)
        progress.write_text(json.dumps(done) + "\n", encoding="utf-8")

    while done["steps"] < settings.steps:
        rng = np.random.default_rng([settings.seed, done["steps"]])
        model, state, loss = machine.step(model, state, batch(settings, done["distance"], rng))
        done["steps"] += 1
        if done["steps"] % 10:
            continue
        right = machine.accuracy(model, batch(settings, done["distance"], np.random.default_rng([1, done["steps"]])))
        seconds = time.perf_counter() - begun
        at = f"step {done['steps']:5d}  distance {done['distance']:6,}"
        say(f"{at}  loss {loss:7.4f}  right {right:6.1%}  {seconds:5.0f} s")
        if right >= SOLVED and done["distance"] == settings.distance:
            break
        if right >= SOLVED:
            done["distance"] *= 2
        if right >= SOLVED or done["steps"] % 200 == 0:
            save()
    save()
    return {"steps": done["steps"], "before": None, "after": measure(settings, machine, model)}


def tune(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Fine-tunes the dense model with another attention."""
    model = models.load(settings.out / "dense")
    optimizer = adam(optax.cosine_decay_schedule(settings.learning_rate / 2, settings.tuning, alpha=0.1))
    machine, state = Machine(settings, settings.stage, optimizer), jax.jit(optimizer.init)(model)
    before = measure(settings, machine, model)
    say(f"before fine-tuning: {before:.1%}")
    for number in range(settings.tuning):
        rng = np.random.default_rng([settings.seed, 2, number])
        model, state, loss = machine.step(model, state, batch(settings, settings.distance, rng, exact=True))
        if number % 10 == 9:
            say(f"step {number + 1:5d}  loss {loss:7.4f}")
    return {"steps": settings.tuning, "before": before, "after": measure(settings, machine, model)}


def measure(settings: Settings, machine: Machine, model: Any) -> float:
    """Accuracy over four batches that no training saw."""
    batches = (batch(settings, settings.distance, np.random.default_rng([9, i]), exact=True) for i in range(4))
    return float(np.mean([machine.accuracy(model, one) for one in batches]))


def table(records: dict[str, dict[str, Any]]) -> Table:
    """What was measured so far."""
    result = Table("attention", "pages", "steps", "right before", "right after", title="copying at a distance")
    share = lambda x: "" if x is None else f"{x:.1%}"
    for name, r in records.items():
        pages = "all" if name == "dense" else "0" if name == "chunk" else f"{r['pages']} of {r['of_pages']}"
        result.add_row(name, pages, f"{r['steps']:,}", share(r["before"]), share(r["after"]))
    return result


def main(settings: Settings) -> None:
    """Runs a stage, adds its figures to those of the others, prints them all."""
    console, path = Console(width=120, highlight=False), settings.out / "copy.json"
    settings.out.mkdir(parents=True, exist_ok=True)
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if settings.stage != "table":
        found = (train_dense if settings.stage == "dense" else tune)(settings, console.print)
        about = {
            **{"ctx": settings.ctx, "distance": settings.distance, "chunk": settings.chunk, "dtype": settings.dtype},
            **{"pages": settings.budget, "of_pages": settings.ctx // settings.page},
            **{"device": jax.devices()[0].device_kind, "jax": jax.__version__},
            "date": datetime.date.today().isoformat(),
        }
        records[settings.stage] = found | about
        path.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    console.print(table(records))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
