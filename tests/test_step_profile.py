"""How much of the page movers' time the step profile calls hidden."""

from pathlib import Path


def test_movers_are_hidden_where_the_busiest_stream_computes(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    from step_profile import movers

    us, ms = 1e3, 1e6
    scope = "jit(step)/while/body/{}/while/body".format
    busiest = [(0, 3.0, "nvjet", ""), (3 * ms + us, 1.0, "nvjet", ""), (10 * ms, 7.0, "paged_attention", "")]
    copies = [
        (1 * ms, 2.0, "_fetch", scope("fill")),  # all of it, across kernels that follow each other
        (9 * ms, 2.0, "_fetch", scope("fill")),  # half
        (5 * ms, 4.0, "_add", scope("backward")),  # nothing
        (10 * ms, 1.0, "MemcpyD2D", scope("fill")),
    ]
    assert movers([copies, busiest]) == {
        "fill fetch": {"milliseconds": 4.0, "hidden": 0.75},
        "backward add": {"milliseconds": 4.0, "hidden": 0.0},
    }
