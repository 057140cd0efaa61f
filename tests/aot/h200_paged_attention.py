"""Compiles `paged_attention` and its gradient for an H200.

    python -m tests.aot.h200_paged_attention "dict(R=32, K=64)"

Prints the copies of pools in the compiled program.
"""

import functools
import re
import sys

import jax

from oomb_jax.pallas_kernels.paged_attention import paged_attention, paged_attention_vjp
from tests.aot.h200 import array, compiled


def main(
    *,
    C=4096,
    M=4,
    G=7,
    H=128,
    S=128,
    R=1,
    K=256,
    P=4096,
    L=2,
    by_head=False,
    segmented=False,
    gradient_dtype="float32",
    stochastic=False,
):
    """Compiles one case, the gradient pools donated."""
    q, own, pool = array(C, M * G, H), array(C, M, H), array(L, P, M, S, H)
    gradients = array(L, P, M, S, H, dtype=gradient_dtype) if gradient_dtype else None
    indices = array(dtype="int32"), array(R, *([M] if by_head else []), K, dtype="int32")
    lse = array(M * G, C, dtype="float32")
    segments = {}
    if segmented:
        segments = {"q_segments": array(C, dtype="int32"), "pool_segments": array(P, S, dtype="int32")}
    rounding = {"rounding_key": array(dtype=jax.random.key(0).dtype)} if stochastic else {}
    forward, backward = (functools.partial(f, implementation="mosaic") for f in (paged_attention, paged_attention_vjp))
    programs = (
        compiled(forward, q, own, own, pool, pool, *indices, keywords=segments),
        compiled(
            backward,
            *(q, own, own, pool, pool, gradients, gradients, *indices, q, lse, q),
            donate_argnums=(5, 6) if gradient_dtype else (),
            keywords=segments | rounding,
        ),
    )
    # A pool has L * P * M * S * H elements, a layer of it P * M * S * H; nothing else is as large.
    shapes = [
        f"{L},{P},{M},{S},{H}",
        f"{L * P * M},{S},{H}",
        f"{P},{M},{S},{H}",
        f"1,{P},{M},{S},{H}",
        f"{P * M},{S},{H}",
    ]
    pattern = re.compile(rf"\[({'|'.join(shapes)})\]\S* (copy|slice|dynamic-slice|fusion|dynamic-update-slice)\(")
    lines = [line.strip() for program in programs for line in program.as_text().splitlines()]
    print("copies:", [line[:200] for line in lines if pattern.search(line)])


if __name__ == "__main__":
    main(**eval(sys.argv[1]))
