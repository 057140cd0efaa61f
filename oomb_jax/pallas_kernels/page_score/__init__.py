"""How much the queries of each page of a chunk want each earlier page."""

from oomb_jax.pallas_kernels.page_score.api import Implementation as Implementation
from oomb_jax.pallas_kernels.page_score.api import page_scores as page_scores
