"""The training program: `python -m oomb_jax.train`."""
