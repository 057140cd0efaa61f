"""Settings of a run. `ctx` is the one dial; everything else has a default, or one that follows from the device."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from oomb_jax.config import Config, Dense, Remat
from oomb_jax.selection import TopK
from oomb_jax.train.metrics import write_whole
from oomb_jax.train.optimizer import Name, OptimizerConfig, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on sequences of `ctx` tokens, chunk by chunk."""

    ctx: int = 32_768
    """Tokens of a sequence."""

    model: str = "qwen2.5-7b"
    """A named model (tiny, qwen2.5-0.5b, -1.5b, -3b, -7b, -14b, -32b, -72b), or a Hugging Face directory."""

    weights: str | None = None
    """A Hugging Face directory to start from, or `random`. None: the directory that `model` names, else random."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """dtype of parameters and computation. None: bfloat16 on a GPU, float32 on a CPU."""

    data: str = "stdlib"
    """What to train on: `stdlib` (the text of Python's own library), .txt, .jsonl, .parquet or .tokens files,
    directories of them, `hf:NAME`, or a mixture such as `a.txt=0.7,books/=0.3`."""

    tokenizer: str | None = None
    """`bytes`, or a `tokenizer.json` or a directory that holds one. None: bytes, or what a token file was packed
    with."""

    pack: bool = False
    """Rows of whole documents that do not attend to each other, instead of slices of the whole text."""

    heldout: float = 0.05
    """Share of the text that is kept for evaluation."""

    steps: int = 100
    """Optimizer steps of the whole run."""

    batch: int = 1
    """Sequences of a step. They go one after the other through the same memory."""

    chunk: int | None = None
    """Tokens that pass through the layers together. None: 4096 on a GPU, 1024 on a CPU, less for a short ctx."""

    page: int = 128
    """Tokens in a page of the key/value pools."""

    attention: Literal["dense", "topk"] = "topk"
    """What a query attends to: `topk`, its own chunk and the best earlier pages; `dense`, all earlier tokens."""

    pages: int = 64
    """Pages that every page of queries chooses, with `topk`."""

    remat: Remat = "dots"
    """What a recomputed chunk keeps for its backward pass: `none` (everything), `dots`, or `full` (recompute all)."""

    implementation: Literal["reference", "mosaic", "triton"] | None = None
    """Which attention runs: `mosaic`, the kernels for Hopper GPUs, `triton`, those for other NVIDIA GPUs, or
    `reference`, plain JAX. None: the fastest that can run."""

    grad_dtype: Literal["bfloat16", "float32"] | None = None
    """dtype of the summed gradients. None: float32."""

    kv_dtype: Literal["float8_e4m3fn", "bfloat16", "float32"] | None = None
    """dtype of stored keys and values. None: that of the model, or float8_e4m3fn where nothing else fits."""

    kv_grad_dtype: Literal["bfloat16", "float32"] | None = None
    """dtype of their gradients. None: float32, or bfloat16 where that does not fit."""

    kv_grad_pages: int | None = None
    """With `topk`, pages of a layer that may hold a gradient of keys and values at once, where pages are fetched: those
    between the last chunk that chose them and their own do. A step that needs more ends after its fill pass, and says
    how many. None: all, or where that does not fit as many as do."""

    offload: Literal["auto", "none", "all"] | int = "auto"
    """Where the pools of keys and values lie: `none`, all in the GPU's memory; `all`, all in host memory; a number, of
    so many layers in the GPU's; `auto`, of as many as fit."""

    optimizer: Name = "adamw"
    """adamw, adafactor, lion or sgd."""

    learning_rate: float = 3e-4
    """Peak rate."""

    warmup: int = 0
    """Steps over which the rate rises."""

    schedule: Schedule = "cosine"
    """constant, cosine or linear, after the warmup and until `steps`."""

    final_fraction: float = 0.1
    """The rate at the end of a falling schedule, as a fraction of the peak."""

    b1: float | None = None
    """Decay of the first moment (adamw, lion). None: 0.9."""

    b2: float | None = None
    """Decay of the second moment. None: 0.95 for adamw, 0.99 for lion."""

    momentum: float | None = None
    """Momentum of sgd. None: none."""

    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases have none."""

    clip: float | None = 1.0
    """Largest gradient norm; a longer gradient is scaled down. None: no limit."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the optimizer's moments."""

    master: Literal["float32", "stochastic"] = "float32"
    """How small updates survive in bfloat16 parameters: `float32` keeps a float32 copy, `stochastic` keeps none and
    rounds stochastically."""

    trainable: tuple[str, ...] = ("*",)
    """Patterns over parameter names, such as `layers.*_proj.weight`; what none matches stays as it is."""

    seed: int = 0
    """Seed of weights, data order and rounding."""

    out: Path | None = None
    """Directory of the run. None: runs/MODEL-CTX."""

    save_every: int = 100
    """Steps between checkpoints; there is always one at the end. 0: none at all."""

    keep: int = 2
    """Checkpoints to keep, beside the one with the lowest held-out loss."""

    export: bool = False
    """Write the trained model at the end, as a Hugging Face directory: `model` in `out`, with the files of
    `tokenizer`."""

    resume: bool = False
    """Go on from the latest checkpoint of `out`."""

    eval_every: int = 0
    """Steps between evaluations on held-out text. 0: only before the first step and after the last."""

    eval_batches: int = 1
    """Batches of an evaluation."""

    log_every: int = 1
    """Steps between lines on the screen; metrics.jsonl has every step."""

    tensorboard: bool = False
    """Write scalars for TensorBoard too (extra `tensorboard`)."""

    wandb: bool = False
    """Send scalars to Weights & Biases too (extra `wandb`)."""

    platform: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to run; `gpu` fails where there is none."""

    config: Path | None = None
    """A settings file, such as the settings.json of an earlier run; flags given beside it win."""

    def check(self) -> "TrainConfig":
        """The same settings. Not in `__post_init__`: tyro would make a box of help out of an error's one line.

        Raises:
          ValueError: a setting that cannot be, with its rule and the way out.
        """
        for field, least in _LEAST.items():
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)}: at least {least}")
        if isinstance(self.offload, int) and self.offload < 0:
            raise ValueError(f"offload={self.offload}: at least 0 layers in the GPU's memory")
        if not 0 <= self.heldout < 1:
            raise ValueError(f"heldout={self.heldout}: a share of the text in [0, 1)")
        self.method(chunk=4096)
        self.optimizer_config()
        return self

    def method(self, chunk: int) -> Config:
        """Settings of the method; `chunk` where the run leaves it open."""
        return Config(
            chunk=max(chunk // self.page, 1) * self.page if self.chunk is None else self.chunk,
            page=self.page,
            attention=TopK(pages=self.pages) if self.attention == "topk" else Dense(),
            remat=self.remat,
            implementation=self.implementation,
            grad_dtype=self.grad_dtype,
            kv_dtype=self.kv_dtype,
            kv_grad_dtype=self.kv_grad_dtype,
            kv_grad_pages=self.kv_grad_pages,
        )

    def optimizer_config(self) -> OptimizerConfig:
        """Settings of the optimizer."""
        return OptimizerConfig(
            name=self.optimizer,
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            schedule=self.schedule,
            steps=self.steps,
            final_fraction=self.final_fraction,
            b1=self.b1,
            b2=self.b2,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip=self.clip,
            state_dtype=self.state_dtype,
            master=self.master,
            trainable=self.trainable,
            seed=self.seed,
        )

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return self.out or Path("runs") / f"{Path(self.model).name}-{self.ctx}"

    def save(self, path: Path) -> None:
        """Writes all settings as JSON, but for whether the run was resumed: that is asked for each time."""
        write_whole(path, json.dumps(_plain(dataclasses.replace(self, resume=False)), indent=2) + "\n")

    def differences(self, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from saved ones: name -> (saved, now)."""
        now = _plain(self)
        return {name: (saved.get(name), now[name]) for name in now if saved.get(name) != now[name]}


def load(path: Path) -> TrainConfig:
    """Settings from a file that `TrainConfig.save` wrote, or that a person did: a JSON object of any of them.

    Raises:
      ValueError: it is not such a file, names an unknown setting, or holds a value that its flag would not take.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config={path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"config={path}: not a JSON file ({error})") from None
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    if not isinstance(values, dict):
        raise ValueError(f"config={path}: not a JSON object of settings")
    if unknown := sorted(set(values) - known):
        raise ValueError(
            f"config={path}: unknown settings {', '.join(unknown)}; they are the flags of --help, with _ for -"
        )
    hints = get_type_hints(TrainConfig)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            kind = hints[name].__name__ if isinstance(hints[name], type) else str(hints[name]).replace("typing.", "")
            raise ValueError(f"config={path}: {name}={json.dumps(value)}: not of the setting's type, {kind}")
    if values.get("out") is not None:
        values["out"] = Path(values["out"])
    if "trainable" in values:
        values["trainable"] = tuple(values["trainable"])
    values.pop("config", None)
    return TrainConfig(**values)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of a JSON file is of a setting's type."""
    origin, choices = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in choices
    if origin is tuple:
        return isinstance(value, list) and all(_fits(part, choices[0]) for part in value)
    if choices:  # a union
        return any(_fits(value, choice) for choice in choices)
    accepted = {float: (float, int), Path: str}.get(kind, kind)
    return isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))


def _plain(settings: TrainConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


_LEAST = {
    "ctx": 1,
    "steps": 1,
    "batch": 1,
    "page": 8,
    "save_every": 0,
    "keep": 1,
    "eval_every": 0,
    "eval_batches": 1,
    "log_every": 1,
    "seed": 0,
}
