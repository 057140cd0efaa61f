"""Pages between a pool, in pinned host memory or on the device, and a staging buffer on the device."""

from oomb_jax.pallas_kernels.page_move.api import Implementation as Implementation
from oomb_jax.pallas_kernels.page_move.api import add_pages as add_pages
from oomb_jax.pallas_kernels.page_move.api import fetch_pages as fetch_pages
from oomb_jax.pallas_kernels.page_move.api import store_pages as store_pages
from oomb_jax.pallas_kernels.page_move.float8 import quantise as quantise
from oomb_jax.pallas_kernels.page_move.stream import on_copy_stream as on_copy_stream
