"""Pictures and tables of what a model or a run does: `python -m oomb_jax.show --help`."""
