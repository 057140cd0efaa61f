"""Compiles the selection of a chunk for an H200.

    python -m tests.aot.h200_selection "dict(P=32768, implementation='mosaic')"

Prints the bytes of temporaries.
"""

import functools
import sys

from oomb_jax.selection import Scope, TopK, select, stage
from tests.aot.h200 import array, compiled


def main(*, C=4096, M=4, G=7, H=128, S=128, P=32768, K=64, scope: Scope = "all_heads", segmented=False, implementation):
    """Compiles scores, choice and slots of one chunk and layer."""
    choose = functools.partial(select, TopK(pages=K, scope=scope), page=S, implementation=implementation)
    integers = functools.partial(array, dtype="int32")
    segments = {"q_segments": integers(C), "pool_segments": integers(P, S)} if segmented else {}

    def choose_and_stage(q, representatives, first_page, **segments):
        table = choose(q, representatives, first_page, **segments)
        return table, stage(table, P)

    program = compiled(choose_and_stage, array(C, M * G, H), array(P, M, H), integers(), keywords=segments)
    print("temporaries:", program.memory_analysis().temp_size_in_bytes)


if __name__ == "__main__":
    main(**eval(sys.argv[1]))
