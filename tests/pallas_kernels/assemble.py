"""Machine code from the PTX that jax-triton leaves in JAX_TRITON_DUMP_DIR, and what the assembler says of it."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def assembler() -> str | None:
    """ptxas: that of the CUDA compiler's packages, as XLA finds it, else the one on the path."""
    packages = importlib.util.find_spec("nvidia")
    folders = packages.submodule_search_locations if packages else None
    found = (Path(folder) / "cu13/bin/ptxas" for folder in folders or ())
    return next((str(path) for path in found if path.exists()), shutil.which("ptxas"))


needs_assembler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None or assembler() is None, reason="needs the CUDA plugin, ptxas"
)


def assembled(capability: int) -> Iterator[tuple[Path, int]]:
    """The PTX of every kernel, and the bytes that it spills on a GPU of that compute capability."""
    architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
    for ptx in sorted(Path(os.environ["JAX_TRITON_DUMP_DIR"]).glob("*/*.ptx")):
        command = [assembler() or "ptxas", "-v", f"-arch={architecture}", ptx, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
        yield ptx, sum(map(int, re.findall(r"(\d+) bytes spill", report.stdout + report.stderr)))
