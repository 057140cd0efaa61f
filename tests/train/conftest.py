"""What whole runs are tested with."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Tokens and compiled code are kept with the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")


@pytest.fixture
def text(tmp_path):
    """A small text with something to learn: words of a small vocabulary in random order."""
    rng = np.random.default_rng(0)
    words = ["chunk", "page", "layer", "token", "head", "pool"]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(rng.choice(words, 4000)))
    return path
