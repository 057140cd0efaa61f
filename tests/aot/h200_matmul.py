"""Compiles the product kernel and its two gradients for an H200.

python -m tests.aot.h200_matmul "dict(I=3584, O=18944)"
"""

import sys

import jax

from oomb_jax.pallas_kernels.matmul import matmul, products
from tests.aot.h200 import array, compiled


def main(*, C=4096, I=3584, O=18944):
    """Compiles one case, sparing four multiprocessors."""

    def both(x, weight, dy):
        with products("mosaic", spare=4):
            y, pull = jax.vjp(matmul, x, weight)
        return y, *pull(dy)

    executable = compiled(both, array(C, I), array(I, O), array(C, O))
    print("temporaries:", executable.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main(**eval(sys.argv[1]))
