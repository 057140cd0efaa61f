"""Matrix products that leave multiprocessors of the GPU to what runs beside them."""

from oomb_jax.pallas_kernels.matmul.api import PRODUCT, Implementation, matmul, products

__all__ = ["PRODUCT", "Implementation", "matmul", "products"]
