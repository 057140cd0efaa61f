"""Strict settings for every test: no implicit promotion, typed shapes checked at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("oomb_jax", "beartype.beartype")
