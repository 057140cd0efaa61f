"""Attention of one chunk to its own keys and to earlier pages of a key/value pool, forward and backward."""

from oomb_jax.pallas_kernels.paged_attention.api import Window as Window
from oomb_jax.pallas_kernels.paged_attention.api import paged_attention as paged_attention
from oomb_jax.pallas_kernels.paged_attention.api import paged_attention_vjp as paged_attention_vjp
from oomb_jax.pallas_kernels.paged_attention.api import sinks_gradient as sinks_gradient
from oomb_jax.pallas_kernels.paged_attention.page_lists import ByPage as ByPage
from oomb_jax.pallas_kernels.paged_attention.page_lists import by_page as by_page
