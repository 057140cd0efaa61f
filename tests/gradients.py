"""Small random models and sequences, and the distance between two gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file

import oomb_jax


def random_model(rng: np.random.Generator, *, layers=2, group=1, kv_heads=1, tied=False, dtype=jnp.float64):
    """A Qwen2 of a few hundred parameters whose weights, biases and norms are all random and of order one."""
    config = oomb_jax.models.ModelConfig(
        vocab_size=31,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=group * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        tie_word_embeddings=tied,
    )

    # Larger than at initialisation, so that attention is far from uniform and every gradient matters.
    def draw(path, x):
        values = rng.normal(size=x.shape, scale=0.6)
        return jnp.asarray(values + 1 if "norm" in jax.tree_util.keystr(path) else values, dtype)

    return jax.tree_util.tree_map_with_path(draw, oomb_jax.models.abstract(config, dtype=dtype))


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: jax.Array
    labels: jax.Array
    segments: jax.Array | None


def random_batch(rng: np.random.Generator, shape: tuple[int, ...], *, segments: bool, ignored: float = 0.2) -> Batch:
    tokens = rng.integers(0, 31, shape)
    labels = np.where(rng.random(shape) < ignored, -100, rng.integers(0, 31, shape))
    ids = np.cumsum(rng.random(shape) < 0.05, axis=-1) if segments else None
    put = lambda x: jnp.asarray(x, jnp.int32)
    return Batch(put(tokens), put(labels), None if ids is None else put(ids))


def poison(pools):
    """Pools that hold NaN, or ids that do not exist, everywhere: whatever a step reads it must have written."""
    fill = lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 2**30)
    return jax.tree.map(fill, pools)


def gradient_error(actual, expected) -> tuple[float, str]:
    """The worst leaf's |actual - expected| over the larger of |expected| and 1e-3 of the whole gradient's norm;
    infinite where a leaf is not finite."""
    worst, name = 0.0, ""
    norm = lambda x: float(np.linalg.norm(np.asarray(x, np.float64)))
    whole = np.sqrt(sum(norm(x) ** 2 for x in jax.tree.leaves(expected)))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        difference = norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        error = difference / max(norm(b), 1e-3 * whole, np.finfo(np.float64).tiny)
        error = error if np.isfinite(error) else np.inf
        if error > worst:
            worst, name = error, jax.tree_util.keystr(path)
    return worst, name


def errors_by_tensor(grads, expected, scale, directory) -> list[float]:
    """|scale * gradient - expected| / |expected| of each tensor of a Hugging Face file, which `grads` is saved as."""
    oomb_jax.models.save(grads, directory)
    actual = load_file(directory / "model.safetensors")
    assert actual.keys() == expected.keys()
    wide = lambda x: np.asarray(x, np.float64)
    norm = np.linalg.norm
    return [float(norm(scale * wide(actual[k]) - wide(want)) / norm(wide(want))) for k, want in expected.items()]


def most_held(selection) -> list[int]:
    """`gradient_slots.most_at_once`, counted chunk by chunk."""
    n, L, rows = selection.shape[:3]
    found = []
    for layer in range(L):
        held, count = set(), []
        for c in reversed(range(n)):
            held -= set(range(c * rows, (c + 1) * rows))
            held |= {int(page) for page in selection[c, layer].ravel() if page >= 0}
            count.append(len(held))
        found.append(max(count))
    return found
