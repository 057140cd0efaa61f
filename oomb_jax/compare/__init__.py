"""Our results beside those of the PyTorch implementation of the paper: gradients, settings, speed and memory.

`python -m oomb_jax.compare --help`; docs/compare.md shows each command. Facts about the other implementation (keys of
its settings, layout of its gradient files, lines of its efficiency test) are those of its public repository,
wenhaoli-xmu/OOMB at commit ba07f27.
"""

from oomb_jax.compare.gradients import Comparison, Difference, compare_gradients
from oomb_jax.compare.method import method_config

__all__ = ["Comparison", "Difference", "compare_gradients", "method_config"]
