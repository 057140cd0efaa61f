"""Optimizers: optax update rules, and around them which parameters train, in which precision, and at what rate."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from jaxtyping import Array, PyTree

from oomb_jax.rounding import stochastic_round
from oomb_jax.shapes import accumulator

Name = Literal["adamw", "adafactor", "lion", "sgd"]
Schedule = Literal["constant", "cosine", "linear"]

# The settings that a rule takes beside the rate, and their values when left out: adamw's of Brown et al. 2020,
# adafactor's of Shazeer and Stern 2018, lion's of Chen et al. 2023.
_DEFAULTS: dict[str, dict[str, float | None]] = {
    "adamw": {"b1": 0.9, "b2": 0.95, "eps": 1e-8},
    "adafactor": {"eps": 1e-30},
    "lion": {"b1": 0.9, "b2": 0.99},
    "sgd": {"momentum": None},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters are updated. With the optimizer's direction u, the rate r and the decay d, one step is

        p <- p - r (u + d p)

    so weight decay is decoupled from the gradient for every optimizer. All of it is computed in float32 (float64 for
    float64 parameters), whatever the parameters and gradients are stored in."""

    name: Name = "adamw"
    """`"adamw"` keeps two moments of each parameter, `"lion"` one, `"sgd"` none (one with `momentum`), `"adafactor"` a
    row and a column for each matrix of at least 128 by 128. Adafactor measures a step relative to the size (root mean
    square) of the parameter; it treats every layer of a stack on its own."""

    learning_rate: float = 3e-4
    """The peak rate. Adafactor is relative and takes larger ones (1e-3 to 1e-2), lion smaller ones (a third to a tenth
    of adamw's)."""

    warmup: int = 0
    """Steps over which the rate rises linearly to its peak; the first is already above zero."""

    schedule: Schedule = "constant"
    """The rate after warmup: `"constant"`, or falling by a `"cosine"` or a `"linear"` ramp until step `steps`."""

    steps: int | None = None
    """Steps of the whole run, warmup included; needed by a falling schedule. Later steps stay at the final rate."""

    final_fraction: float = 0.1
    """The final rate of a falling schedule, as a fraction of the peak."""

    b1: float | None = None
    """adamw, lion: decay of the first moment. None: 0.9."""

    b2: float | None = None
    """adamw: decay of the second moment, None: 0.95. lion: decay of its moment, None: 0.99."""

    eps: float | None = None
    """adamw: added to the root of the second moment, None: 1e-8. adafactor: added to squared gradients, None: 1e-30."""

    momentum: float | None = None
    """sgd: decay of the momentum. None: no momentum and no state."""

    weight_decay: float = 0.1
    """Decay of every matrix, embeddings and head included. Norms, biases and anything else that is a vector in its
    layer do not decay."""

    clip: float | None = 1.0
    """Largest norm of the whole gradient (over the trainable parameters); a longer one is scaled down. None: no
    limit."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the moments. bfloat16 halves them and is rounded stochastically, since a second moment changes by less
    than half a bfloat16 step at a time and would stall. Moments of float64 parameters stay float64."""

    master: Literal["float32", "stochastic"] = "float32"
    """How small updates survive in parameters of 16 bits. `"float32"` keeps a float32 copy of each trainable one, of
    which the model is the rounded image. `"stochastic"` keeps no copy and rounds each bfloat16 update stochastically.
    Parameters of 32 and 64 bits need neither and get neither."""

    trainable: tuple[str, ...] = ("*",)
    """Glob patterns over dotted parameter names, such as `"layers.*_proj.weight"` (`*` spans dots). What none matches
    is frozen: it keeps its bits and takes no state."""

    seed: int = 0
    """Seed of stochastic rounding. The random bits are a function of it and of the step."""

    def __post_init__(self):
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field}={getattr(self, field)!r}: one of {', '.join(map(repr, choices))}")
        for field, low, high in _RANGES:
            value = getattr(self, field)
            if value is not None and not low <= value < high:
                raise ValueError(f"{field}={value}: {f'at least {low}' if math.isinf(high) else f'in [{low}, {high})'}")
        for field in ("b1", "b2", "eps", "momentum"):
            if getattr(self, field) is not None and field not in _DEFAULTS[self.name]:
                raise ValueError(f"{field}={getattr(self, field)}: {self.name} has no such setting; leave it out")
        if self.clip == 0:
            raise ValueError("clip=0: a largest gradient norm of zero trains nothing; use None for no limit")
        if self.final_fraction > 1:
            raise ValueError(f"final_fraction={self.final_fraction}: a fraction of the peak rate, at most 1")
        if self.schedule != "constant" and (self.steps is None or self.steps <= self.warmup):
            raise ValueError(
                f"steps={self.steps}: the {self.schedule} schedule needs the steps of the run, more than "
                f"warmup={self.warmup}; set steps or use the constant schedule"
            )
        if not self.trainable:
            raise ValueError("trainable=(): no parameter would train; give at least one pattern, such as '*'")


_CHOICES = {
    "name": tuple(_DEFAULTS),
    "schedule": ("constant", "cosine", "linear"),
    "state_dtype": ("float32", "bfloat16"),
    "master": ("float32", "stochastic"),
}
_RANGES = (
    ("learning_rate", 0, math.inf),
    ("warmup", 0, math.inf),
    ("steps", 1, math.inf),
    ("final_fraction", 0, math.inf),
    ("b1", 0, 1),
    ("b2", 0, 1),
    ("eps", 0, math.inf),
    ("momentum", 0, 1),
    ("weight_decay", 0, math.inf),
    ("clip", 0, math.inf),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """All that a step leaves for the next one."""

    step: PyTree
    """int32 []: updates so far."""

    moments: PyTree
    """The optax state, over a dictionary of trainable parameters by name."""

    masters: dict[str, Any]
    """float32 copies of the trainable 16-bit parameters by name; empty without them."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Optimizer:
    """An optimizer for one model, made by `build`. Its methods are pure. To update in place, donate model and state:

        update = jax.jit(optimizer.update, donate_argnums=(0, 2), keep_unused=True)
        model, state, stats = update(model, grads, state)

    With float32 masters the old model is not read; `keep_unused` lets the new one take its memory all the same. No
    result can take the memory of the gradients, so donating them only earns a warning."""

    config: OptimizerConfig
    names: tuple[str, ...]
    """Names of all parameters, in leaf order."""

    trainable: tuple[str, ...]
    """Names of those that train."""

    decayed: frozenset[str]
    """Names of those that decay."""

    rule: optax.GradientTransformation
    """Gradients to the direction u."""

    def init(self, model: PyTree) -> OptimizerState:
        """The state before the first step."""
        return jax.jit(self._init)(self._select(model))

    def _init(self, params: dict[str, Any]) -> OptimizerState:
        wide = {name: _widen(p) for name, p in params.items()}
        narrow = params if self.config.master == "float32" else {}
        return OptimizerState(
            step=jnp.zeros((), jnp.int32),
            # Every rule starts from zeros, which plain rounding leaves exact.
            moments=jax.tree.map(
                lambda m: m.astype(self.config.state_dtype) if _is_f32(m) else m, self.rule.init(wide)
            ),
            masters={name: wide[name] for name, p in narrow.items() if p.dtype != wide[name].dtype},
        )

    def update(
        self, model: PyTree, grads: PyTree, state: OptimizerState
    ) -> tuple[PyTree, OptimizerState, dict[str, Array]]:
        """One step.

        Args:
            model: parameters as a pytree of arrays, such as an NNX module or a dictionary.
            grads: a pytree like `model`, averaged; any floating dtype. Those of frozen parameters are not read.
            state: from `init` or the step before.

        Returns:
            The new model and state, with the dtypes of the old, and the step's `"gradient_norm"` (over the trainable
            parameters, before clipping) and `"learning_rate"`, both float32 (the norm float64 for float64 gradients).
        """
        params = self._select(model)
        g = {name: grad.astype(accumulator(params[name].dtype)) for name, grad in self._select(grads).items()}
        norm = _norm(g.values())
        if self.config.clip is not None:
            # Not a plain division by the norm, which may be zero.
            scale = self.config.clip / jnp.maximum(norm, self.config.clip)
            g = {name: grad * scale.astype(grad.dtype) for name, grad in g.items()}
        old = {name: state.masters.get(name, _widen(p)) for name, p in params.items()}
        with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with rates
            u, moments = cast(Any, self.rule.update(g, jax.tree.map(_widen, state.moments), old))
        rate = learning_rate(self.config, state.step)
        new = {name: self._apply(name, old[name], u[name], rate) for name in params}
        key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)
        if self.config.state_dtype == "bfloat16":
            moments = _round_all(moments, jax.random.fold_in(key, 0))
        narrow = {name: w for name, w in new.items() if w.dtype != params[name].dtype}
        if self.config.master == "stochastic":
            rounded, masters = _round_all(narrow, jax.random.fold_in(key, 1)), {}
        else:
            rounded, masters = {name: w.astype(params[name].dtype) for name, w in narrow.items()}, narrow
        return (
            self._replace(model, new | rounded),
            OptimizerState(step=state.step + 1, moments=moments, masters=masters),
            {"gradient_norm": norm, "learning_rate": rate},
        )

    def _apply(self, name: str, p: Array, u: Array, rate: Array) -> Array:
        decay = self.config.weight_decay if name in self.decayed else 0.0
        return p - rate.astype(p.dtype) * (u + decay * p if decay else u)

    def _select(self, tree: PyTree) -> dict[str, Any]:
        names = parameter_names(tree)
        if names != self.names:
            raise ValueError(
                f"{len(names)} parameters, {len(self.names)} when the optimizer was built; not in both: "
                f"{_shorten(set(names) ^ set(self.names))}; build the optimizer for this model"
            )
        leaves = dict(zip(names, jax.tree.leaves(tree), strict=True))
        return {name: leaves[name] for name in self.trainable}

    def _replace(self, model: PyTree, new: dict[str, Any]) -> PyTree:
        leaves, treedef = jax.tree.flatten(model)
        return jax.tree.unflatten(treedef, [new.get(name, p) for name, p in zip(self.names, leaves, strict=True)])


def build(config: OptimizerConfig, model: PyTree) -> Optimizer:
    """An optimizer for a model of these parameters (arrays, or shapes and dtypes alone).

    A parameter under a component named `layers` is a stack with one slice for each layer along its first axis.

    Raises:
        ValueError: a pattern of `config.trainable` matches no floating-point parameter, or a trainable parameter is of
            a dtype that `config.master` cannot keep exact.
    """
    names = parameter_names(model)
    leaves = dict(zip(names, jax.tree.leaves(model), strict=True))
    floats = [name for name in names if jnp.issubdtype(leaves[name].dtype, jnp.floating)]
    for pattern in config.trainable:
        if not fnmatch.filter(floats, pattern):
            raise ValueError(f"trainable={pattern!r}: matches no parameter; the parameters are {', '.join(floats)}")
    trainable = tuple(n for n in floats if any(fnmatch.fnmatchcase(n, pattern) for pattern in config.trainable))
    for name in trainable:
        dtype = leaves[name].dtype
        if config.master == "stochastic" and dtype.itemsize < 4 and dtype != jnp.bfloat16:
            raise ValueError(f"master='stochastic': {name} is {dtype} and only bfloat16 is rounded so; use 'float32'")
    stacked = frozenset(name for name in trainable if "layers" in name.split("."))
    return Optimizer(
        config=config,
        names=names,
        trainable=trainable,
        decayed=frozenset(n for n in trainable if _decays(n, leaves[n].ndim - (n in stacked))),
        rule=_rule(config, stacked),
    )


def learning_rate(config: OptimizerConfig, step: Array) -> Array:
    """The float32 rate of the update that follows `step` updates (an int32 scalar)."""
    peak = config.learning_rate
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, _steps(config) - config.warmup, config.final_fraction)
    else:
        after = optax.linear_schedule(peak, peak * config.final_fraction, _steps(config) - config.warmup)
    if config.warmup:
        before = optax.linear_schedule(peak / (config.warmup + 1), peak, config.warmup)
        after = optax.join_schedules([before, after], [config.warmup])
    with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with rates
        return jnp.asarray(after(step), jnp.float32)


def parameter_names(tree: PyTree) -> tuple[str, ...]:
    """Dotted names of the leaves in leaf order, such as `layers.q_proj.weight`. The `value` of an NNX variable is left
    out.

    Raises:
        ValueError: two leaves have the same name.
    """
    names = tuple(map(_name, (path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])))
    if len(set(names)) != len(names):
        raise ValueError(f"two parameters named {next(n for n in names if names.count(n) > 1)!r}: names must differ")
    return names


def _name(path: tuple[Any, ...]) -> str:
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    parts = []
    for entry in path:
        match entry:
            case GetAttrKey(name=part) | DictKey(key=part) | SequenceKey(idx=part) | FlattenedIndexKey(key=part):
                parts.append(str(part))
            case _:
                raise TypeError(f"{entry!r}: a tree of modules, dataclasses, dictionaries, lists and tuples has names")
    return ".".join(parts)


def _rule(config: OptimizerConfig, stacked: frozenset[str]) -> optax.GradientTransformation:
    given: dict[str, Any] = {
        field: default if getattr(config, field) is None else getattr(config, field)
        for field, default in _DEFAULTS[config.name].items()
    }
    if config.name == "adamw":
        return optax.scale_by_adam(**given)
    if config.name == "lion":
        return optax.scale_by_lion(**given)
    if config.name == "adafactor":
        adafactor = optax.chain(
            optax.scale_by_factored_rms(epsilon=given["eps"]),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_param_block_rms(),
        )
        return _each_matrix(adafactor, stacked)
    return optax.identity() if config.momentum is None else optax.trace(config.momentum)


def _each_matrix(rule: optax.GradientTransformation, stacked: frozenset[str]) -> optax.GradientTransformation:
    """`rule` on one parameter at a time, and of a stack on one layer: what it factors and averages over is a matrix of
    the model, never the layer axis."""

    def each(function: Callable, name: str) -> Callable:
        return jax.vmap(function) if name in stacked else function

    def init(params: Any) -> Any:
        return {name: each(rule.init, name)(p) for name, p in params.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        both = {n: each(rule.update, n)(g, state[n], params[n]) for n, g in updates.items()}
        return {name: u for name, (u, _) in both.items()}, {name: s for name, (_, s) in both.items()}

    return optax.GradientTransformation(init, update)


def _decays(name: str, ndim: int) -> bool:
    parts = name.split(".")
    return ndim >= 2 and parts[-1] != "bias" and not any("norm" in part for part in parts)


def _norm(grads: Iterable[Array]) -> Array:
    squares = [jnp.sum(jnp.square(g)) for g in grads]
    dtype = jnp.float64 if any(s.dtype == jnp.float64 for s in squares) else jnp.float32
    return jnp.sqrt(sum((s.astype(dtype) for s in squares), jnp.zeros((), dtype)))


def _round_all(tree: Any, key: Array) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    rounded = [stochastic_round(x, jnp.bfloat16, k) if _is_f32(x) else x for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, rounded)


def _widen(x: Array) -> Array:
    return x.astype(accumulator(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _is_f32(x: Array) -> bool:
    return x.dtype == jnp.float32


def _steps(config: OptimizerConfig) -> int:
    assert config.steps is not None
    return config.steps


def _shorten(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
