"""What the benchmark of the kernels takes for a model's choice."""

from pathlib import Path

import numpy as np


def test_the_models_pages_are_what_a_chunk_at_the_end_chooses(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import bench_kernels

    monkeypatch.setattr(bench_kernels, "MODEL", "tiny")
    monkeypatch.setattr(bench_kernels, "MODEL_LAYERS", 2)
    settings = bench_kernels.Settings(queries=256, keys=1024, top_k=6, pool=32, page=32)
    table = bench_kernels.tables(settings)["top-k, the model's pages"]
    rows = settings.queries // settings.page
    assert table.shape == (rows, settings.top_k)
    assert np.all(np.diff(table) > 0)
    assert table.min() >= 0
    assert table.max() < settings.pool - rows  # earlier pages
    assert settings.top_k < len(np.unique(table))  # each query page chose for itself
    assert "top-k, the model's pages" not in bench_kernels.tables(bench_kernels.Settings(only=("top-k",)))
