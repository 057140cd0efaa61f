import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oomb_jax.train.optimizer import OptimizerConfig, OptimizerState, build, learning_rate, parameter_names
from tests.tolerance import OPTIMIZER_STEP

L = 3
SHAPES = {
    "embed.weight": (37, 12),
    "layers.gain": (L, 12),
    "layers.q_norm.weight": (L, 4, 5),
    "layers.q_proj.weight": (L, 12, 20),
    "layers.q_proj.bias": (L, 4, 5),
    "layers.up_proj.weight": (L, 129, 140),
    "norm.weight": (12,),
}
DECAYED = {"embed.weight", "layers.q_proj.weight", "layers.up_proj.weight"}
SMALL = {name: SHAPES[name] for name in ("embed.weight", "layers.q_proj.weight", "layers.q_proj.bias")}
NAMES = ("adamw", "adafactor", "lion", "sgd")


def _nested(flat):
    tree = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _flat(tree):
    return dict(zip(parameter_names(tree), jax.tree.leaves(tree), strict=True))


def _random(seed, dtype=jnp.float32, scale=1.0, shapes=SHAPES):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    values = (scale * jax.random.normal(k, s) for k, s in zip(keys, shapes.values(), strict=True))
    return _nested({name: value.astype(dtype) for name, value in zip(shapes, values, strict=True)})


def _run(config, model, gradients):
    optimizer = build(config, model)
    update = jax.jit(optimizer.update)
    state, stats = optimizer.init(model), []
    for grads in gradients:
        model, state, stat = update(model, grads, state)
        stats.append(stat)
    return model, state, stats


def _bits_equal(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class _NumpyRule:
    """The update rules, one parameter of one layer at a time, in float64, written from their papers."""

    def __init__(self, config):
        self.config, self.m, self.v, self.t = config, 0.0, 0.0, 0
        self.row, self.col = 0.0, 0.0

    def __call__(self, p, g):
        self.t += 1
        match self.config.name:
            case "adamw":
                b1, b2 = self.config.b1 or 0.9, self.config.b2 or 0.95
                self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g**2
                return self.m / (1 - b1**self.t) / (np.sqrt(self.v / (1 - b2**self.t)) + 1e-8)
            case "lion":
                u, self.m = np.sign(0.9 * self.m + 0.1 * g), 0.99 * self.m + 0.01 * g
                return u
            case "sgd":
                self.m = g + (self.config.momentum or 0.0) * self.m
                return self.m
            case "adafactor":
                b = 1 - self.t**-0.8
                square = g**2 + 1e-30
                if g.ndim == 2 and min(g.shape) >= 128:
                    self.row = b * self.row + (1 - b) * square.mean(1)
                    self.col = b * self.col + (1 - b) * square.mean(0)
                    u = g / np.sqrt(np.outer(self.row, self.col) / self.row.mean())
                else:
                    self.v = b * self.v + (1 - b) * square
                    u = g / np.sqrt(self.v)
                u = u / max(1.0, np.sqrt(np.mean(u**2)))
                return u * max(1e-3, np.sqrt(np.mean(p**2)))
            case unknown:
                raise AssertionError(unknown)


def _numpy_run(config, model, gradients):
    params = {n: np.array(p, np.float64) for n, p in _flat(model).items()}
    split = {n: "layers" in n.split(".") for n in params}
    rules = {n: [_NumpyRule(config) for _ in range(len(p) if split[n] else 1)] for n, p in params.items()}
    for step, tree in enumerate(gradients):
        grads = {n: np.asarray(g, np.float64) for n, g in _flat(tree).items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        rate = float(learning_rate(config, jnp.int32(step)))
        for n, p in params.items():
            g = grads[n] * min(1.0, config.clip / norm)
            layers = [(p[l], g[l], rule) for l, rule in enumerate(rules[n])] if split[n] else [(p, g, rules[n][0])]
            u = [rule(a, b) for a, b, rule in layers]
            decay = config.weight_decay if n in DECAYED else 0.0
            params[n] = p - rate * ((np.stack(u) if split[n] else u[0]) + decay * p)
    return params


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "adamw"},
        {"name": "adamw", "b1": 0.8, "b2": 0.999, "schedule": "cosine", "steps": 6, "warmup": 2},
        {"name": "lion"},
        {"name": "sgd", "schedule": "linear", "steps": 5},
        {"name": "sgd", "momentum": 0.7},
        {"name": "adafactor"},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_rules_match_their_equations(settings, dtype):
    with jax.enable_x64(dtype == "float64"):
        config = OptimizerConfig(learning_rate=0.05, weight_decay=0.3, clip=40.0, **settings)
        # Norms from about 20 to 300: some steps are clipped and some are not.
        gradients = [_random(10 + i, dtype, scale) for i, scale in enumerate((1.0, 0.1, 0.03, 0.5))]
        model = _random(0, dtype)
        want = _numpy_run(config, model, gradients)
        got, _, _ = _run(config, model, gradients)
        for name, p in _flat(got).items():
            assert p.dtype == dtype
            error = np.linalg.norm(np.asarray(p, np.float64) - want[name]) / np.linalg.norm(want[name])
            assert error < OPTIMIZER_STEP, name


def test_adafactor_state_of_a_stack_is_per_layer():
    shapes = {"layers.w": (200, 128, 130), "head": (128, 300)}
    model = jax.eval_shape(lambda: _random(0, jnp.bfloat16, shapes=shapes))
    state = jax.eval_shape(build(OptimizerConfig(name="adafactor"), model).init, model)
    sizes = {x.shape for x in jax.tree.leaves(state.moments)}
    # 200 layers are more than a matrix has rows: factoring the two largest axes of the stack would mix layers.
    assert {(200, 128), (200, 130), (128,), (300,)} <= sizes
    assert all(np.prod(s) <= 200 * 130 for s in sizes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("master", "state_dtype"), [("float32", "float32"), ("stochastic", "bfloat16")])
def test_dtypes_stay(name, master, state_dtype):
    with jax.enable_x64(True):
        dtypes = (jnp.bfloat16, jnp.float32, jnp.float64)
        model = {n: _random(i, d, shapes=SMALL) for i, (n, d) in enumerate(zip("abc", dtypes, strict=True))}
        grads = jax.tree.map(lambda p: p.astype(jnp.bfloat16), model)
        config = OptimizerConfig(name=name, master=master, state_dtype=state_dtype)
        optimizer = build(config, model)
        before = optimizer.init(model)
        after, state, stats = jax.jit(optimizer.update)(model, grads, before)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (model, before))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), (after, state)) == shapes
        assert set(state.masters) == ({f"a.{n}" for n in SMALL} if master == "float32" else set())
        moments = {x.dtype for x in jax.tree.leaves(state.moments) if jnp.issubdtype(x.dtype, jnp.floating)}
        assert moments in ({jnp.dtype(state_dtype), jnp.dtype("float64")}, set())
        assert stats["gradient_norm"].dtype == jnp.float64
        assert stats["learning_rate"].dtype == jnp.float32


@pytest.mark.parametrize("master", ["float32", "stochastic"])
def test_small_updates_do_not_vanish_in_bfloat16(master):
    config = OptimizerConfig(name="sgd", learning_rate=2.0**-12, weight_decay=0.0, clip=None, master=master)
    model = {"w": jnp.ones((64, 65), jnp.bfloat16)}
    optimizer = build(config, model)
    step = jax.jit(lambda _, carry: optimizer.update(carry[0], jax.tree.map(jnp.negative, ones), carry[1])[:2])
    ones = {"w": jnp.ones((64, 65), jnp.bfloat16)}
    model, state = jax.lax.fori_loop(0, 1024, step, (model, optimizer.init(model)))
    # One update is a sixteenth of the distance between bfloat16 numbers: rounding to nearest would leave every 1 as is.
    assert float(model["w"].astype(jnp.float32).mean()) == pytest.approx(1.25, abs=0 if master == "float32" else 2e-3)
    if master == "float32":
        assert _bits_equal(model["w"], state.masters["w"].astype(jnp.bfloat16))


def test_bfloat16_second_moment_does_not_stall():
    config = OptimizerConfig(b2=0.999, state_dtype="bfloat16", clip=None)
    model = {"w": jnp.ones((40, 50))}
    optimizer = build(config, model)
    grads = jax.tree.map(lambda p: 0.1 * p, model)
    step = jax.jit(lambda _, carry: optimizer.update(carry[0], grads, carry[1])[:2])
    _, state = jax.lax.fori_loop(0, 3000, step, (model, optimizer.init(model)))
    want = 0.01 * (1 - 0.999**3000)
    # Rounding to nearest stops at the first value of which a thousandth is below half a bfloat16 step.
    assert float(state.moments.nu["w"].astype(jnp.float32).mean()) == pytest.approx(want, rel=0.01)


def test_frozen_parameters_keep_their_bits_and_take_no_state():
    model, grads = _random(0, jnp.bfloat16), _random(1)
    config = OptimizerConfig(trainable=("layers.*_proj.weight", "norm.*"), clip=None, learning_rate=0.1)
    trained = {"layers.q_proj.weight", "layers.up_proj.weight", "norm.weight"}
    after, state, stats = _run(config, model, [grads])
    for name, p in _flat(model).items():
        assert _bits_equal(p, _flat(after)[name]) == (name not in trained)
    assert set(state.masters) == set(state.moments.mu) == set(state.moments.nu) == trained
    squares = sum(float(jnp.sum(jnp.square(g))) for n, g in _flat(grads).items() if n in trained)
    assert float(stats[0]["gradient_norm"]) == pytest.approx(squares**0.5, rel=1e-6)


def test_norms_and_biases_do_not_decay():
    model = _random(0)
    zeros = jax.tree.map(jnp.zeros_like, model)
    after, _, stats = _run(OptimizerConfig(learning_rate=0.5, weight_decay=0.5), model, [zeros])
    for name, p in _flat(model).items():
        np.testing.assert_allclose(_flat(after)[name], (0.75 if name in DECAYED else 1.0) * p, rtol=1e-6)
    assert float(stats[0]["gradient_norm"]) == 0.0


def test_clip_limits_the_norm_of_the_whole_gradient_in_float32():
    model = {"a": jnp.zeros((50, 40), jnp.bfloat16), "b": jnp.zeros((500,), jnp.bfloat16)}
    value = 1 + 2.0**-7  # a bfloat16 whose square is none
    grads = jax.tree.map(lambda p: jnp.full_like(p, value), model)
    config = OptimizerConfig(name="sgd", learning_rate=1.0, clip=0.5)
    _, state, stats = _run(config, model, [grads])
    assert float(stats[0]["gradient_norm"]) == pytest.approx(50 * value, rel=1e-6)
    for p in state.masters.values():
        np.testing.assert_allclose(p, -0.01, rtol=1e-6)


def test_update_donates_and_makes_no_copies():
    model = _random(0, jnp.bfloat16, shapes={"a": (512, 1024), "b": (700, 300)})
    grads = jax.tree.map(lambda p: p.astype(jnp.float32), model)
    for name in ("adamw", "sgd"):
        optimizer = build(OptimizerConfig(name=name), model)
        state = optimizer.init(model)
        update = jax.jit(optimizer.update, donate_argnums=(0, 2), keep_unused=True)
        compiled = update.lower(model, grads, state).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        carried = sum(x.nbytes for x in jax.tree.leaves((model, state)))
        assert memory.alias_size_in_bytes == carried
        assert memory.temp_size_in_bytes < 0.01 * carried


def test_stochastic_rounding_is_a_function_of_seed_and_step():
    model, *gradients = (_random(i, d, shapes=SMALL) for i, d in enumerate((jnp.bfloat16, jnp.float32, jnp.float32)))
    config = OptimizerConfig(master="stochastic", state_dtype="bfloat16")
    once, again = (_run(config, model, gradients)[:2] for _ in range(2))
    assert all(map(_bits_equal, jax.tree.leaves(once), jax.tree.leaves(again)))
    other, _, _ = _run(dataclasses.replace(config, seed=1), model, gradients)
    assert not all(map(_bits_equal, jax.tree.leaves(once[0]), jax.tree.leaves(other)))
    # Two steps alike differ in their bits only.
    optimizer = build(config, model)
    start = optimizer.init(model)
    later = OptimizerState(step=jnp.int32(1), moments=start.moments, masters=start.masters)
    a, b = (jax.jit(optimizer.update)(model, gradients[0], s)[0]["embed"]["weight"] for s in (start, later))
    assert not _bits_equal(a, b)


def test_schedules():
    def rates(**settings):
        config = OptimizerConfig(learning_rate=1.0, **settings)
        return [float(jax.jit(lambda s: learning_rate(config, s))(jnp.int32(s))) for s in range(12)]

    assert rates(warmup=3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 9)
    linear = rates(schedule="linear", warmup=1, steps=9, final_fraction=0.2)
    assert linear == pytest.approx([0.5] + [1 - 0.1 * i for i in range(8)] + [0.2] * 3)
    cosine = rates(schedule="cosine", steps=10, final_fraction=0.1)
    assert cosine == pytest.approx([0.1 + 0.45 * (1 + np.cos(np.pi * min(i, 10) / 10)) for i in range(12)])


class _Linear(nnx.Module):
    def __init__(self, key):
        self.weight = nnx.Param(jax.random.normal(key, (4, 5)))


class _Model(nnx.Module):
    def __init__(self, key):
        self.embed = _Linear(key)
        self.layers = jax.vmap(_Linear)(jax.random.split(key, 2))
        self.tables = nnx.Variable(jnp.arange(3))


def test_nnx_modules_are_named_and_trained():
    model = _Model(jax.random.key(0))
    assert parameter_names(model) == ("embed.weight", "layers.weight", "tables")
    assert parameter_names({"a": [1, {"value": 2}], "b": (3,)}) == ("a.0", "a.1.value", "b.0")
    after, state, _ = _run(OptimizerConfig(), model, [model])
    assert isinstance(after, _Model)
    assert set(state.moments.mu) == {"embed.weight", "layers.weight"}
    assert not np.array_equal(after.embed.weight[...], model.embed.weight[...])
    np.testing.assert_array_equal(after.tables[...], model.tables[...])
    with pytest.raises(ValueError, match=r"two parameters named 'a\.b'"):
        parameter_names({"a": {"b": 1}, "a.b": 2})


def test_wrong_models_and_patterns_are_refused():
    model = _random(0, jnp.float16)
    with pytest.raises(ValueError, match=r"trainable='heads\.\*': matches no parameter; .*embed\.weight, layers\."):
        build(OptimizerConfig(trainable=("*norm*", "heads.*")), model)
    with pytest.raises(ValueError, match=r"master='stochastic': embed\.weight is float16"):
        build(OptimizerConfig(master="stochastic"), model)
    optimizer = build(OptimizerConfig(), model)
    with pytest.raises(ValueError, match=r"not in both: extra; build the optimizer for this model"):
        optimizer.init({**model, "extra": jnp.ones((2,))})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, r"name='adam': one of 'adamw'"),
        ({"master": "none"}, r"master='none': one of 'float32', 'stochastic'"),
        ({"state_dtype": "float16"}, r"state_dtype='float16': one of"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan: at least 0"),
        ({"b2": 1.0}, r"b2=1\.0: in \[0, 1\)"),
        ({"name": "sgd", "b1": 0.9}, r"b1=0\.9: sgd has no such setting"),
        ({"momentum": 0.9}, r"momentum=0\.9: adamw has no such setting"),
        ({"clip": 0.0}, r"clip=0: .* use None"),
        ({"schedule": "cosine"}, r"steps=None: the cosine schedule needs the steps"),
        ({"schedule": "linear", "steps": 5, "warmup": 5}, r"steps=5: .* more than warmup=5"),
        ({"final_fraction": 1.5, "schedule": "linear", "steps": 5}, r"final_fraction=1\.5: .* at most 1"),
        ({"trainable": ()}, r"trainable=\(\): no parameter would train"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    # Past the constructor, whose types the tests check before the settings themselves.
    config = OptimizerConfig()
    for field, value in settings.items():
        object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=message):
        config.__post_init__()
