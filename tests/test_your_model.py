"""The example of docs/your-model.md: run as it is printed, then against full attention in float64."""

import contextlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oomb_jax
from tests.gradients import gradient_error, random_batch
from tests.tolerance import F32_GRADIENT, F64_GRADIENT

PAGE = Path(__file__).parents[1] / "docs" / "your-model.md"


@contextlib.contextmanager
def as_users_run_it():
    """JAX's own settings instead of the suite's strict ones."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def example():
    """The names that the example defines, and the lines that it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 60
    printed = []
    names = {"print": lambda *values: printed.append(values)}
    with as_users_run_it():
        exec(compile(code, str(PAGE), "exec"), names)
    return names, printed


def test_example_prints_small_errors_and_learns(example):
    _, ((_, errors), *lines) = example
    assert len(jax.tree.leaves(errors)) == 7
    assert max(jax.tree.leaves(errors)) <= F32_GRADIENT
    losses = [float(line.removeprefix("loss ")) for (line,) in lines]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 2


def test_gradients_of_the_example_equal_full_attention_in_float64(example):
    create = example[0]["create"]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True), as_users_run_it():
        model = create(jax.random.key(1), L=3, D=12, N=3, H=8, F=20, V=31)
        # Positions and norms must matter, or the comparison would not see them.
        model = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), model)
        batch = random_batch(rng, (2, 77), segments=True)
        config = oomb_jax.Config(page=8, chunk=24)
        pools = oomb_jax.create_pools(model, 77, config)
        arguments = batch.tokens, batch.labels, config, batch.segments
        value_and_grad = jax.jit(oomb_jax.value_and_grad, static_argnames="config")
        full = jax.jit(oomb_jax.full_attention_value_and_grad, static_argnames="config")
        loss, grads, _ = value_and_grad(model, pools, *arguments)
        expected_loss, expected, _ = full(model, None, *arguments)
    assert loss.dtype == jnp.float64
    assert abs(float(loss - expected_loss)) <= F64_GRADIENT * float(expected_loss)
    error, name = gradient_error(grads, expected)
    assert error <= F64_GRADIENT, name


def test_a_model_whose_layers_have_no_name_is_refused(example):
    """JAX numbers the fields of such a class: its layers would pass for outer parameters and get no gradient."""
    GPT = example[0]["GPT"]

    @jax.tree_util.register_pytree_node_class
    class Nameless:
        def __init__(self, table, layers, norm):
            self.table, self.layers, self.norm = table, layers, norm

        embed, head = GPT.embed, GPT.head

        def tree_flatten(self):
            return (self.table, self.layers, self.norm), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    model = Nameless(*example[0]["create"](jax.random.key(1)))
    config, tokens = oomb_jax.Config(page=8, chunk=16), jnp.zeros(20, jnp.int32)
    with as_users_run_it():
        pools = oomb_jax.create_pools(model, 20, config)
        with pytest.raises(ValueError, match="no field named `layers`"):
            oomb_jax.value_and_grad(model, pools, tokens, tokens, config)
