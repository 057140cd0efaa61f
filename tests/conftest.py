"""Strict settings for every test: no implicit promotion, typed shapes checked at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

# Most of the suite's time is compilation; what a test measures of optimised code, it compiles with optimisations.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_default_matmul_precision", "highest")  # a GPU would round float32 to TensorFloat-32
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("oomb_jax", "beartype.beartype")


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Frees compiled programs after each file: one takes dozens of memory maps, of which a process may have 65,530."""
    yield
    jax.clear_caches()
