"""How much of the page movers' time the step profile calls hidden."""

from pathlib import Path

import pytest


@pytest.fixture
def profile(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import step_profile

    return step_profile


def test_kernels_have_their_kind_by_name_or_else_by_scope(profile):
    scope = "jit(step)/fill/while/body/{}/top_k".format
    stream = [
        (0, 1.0, "nvjet_sm90", scope("selection")),  # a product, whoever asked for it
        (0, 2.0, "loop_select_fusion", scope("selection")),
        (0, 3.0, "loop_select_fusion", scope("vmap(slots)")),
        (0, 4.0, "sort_86_1", ""),
        (0, 4.0, "sort_86_1", ""),
        (0, 5.0, "loop_reduce_fusion", scope("recall")),
        (0, 6.0, "loop_add_fusion", scope("backslots")),
    ]
    found = [(one["kind"], one["number"], one["milliseconds"]) for one in profile.kernels(stream)]
    other = [("other", 1, 6.0), ("recall", 1, 5.0)]
    assert found == [("selection", 2, 8.0), *other, ("selection", 1, 3.0), ("selection", 1, 2.0), ("matmul", 1, 1.0)]


def test_movers_are_hidden_where_the_busiest_stream_computes(profile):
    us, ms = 1e3, 1e6
    scope = "jit(step)/while/body/{}/while/body".format
    busiest = [(0, 3.0, "nvjet", ""), (3 * ms + us, 1.0, "nvjet", ""), (10 * ms, 7.0, "paged_attention", "")]
    copies = [
        (1 * ms, 2.0, "_fetch", scope("fill")),  # all of it, across kernels that follow each other
        (9 * ms, 2.0, "_fetch", scope("fill")),  # half
        (5 * ms, 4.0, "_add", scope("backward")),  # nothing
        (10 * ms, 1.0, "MemcpyD2D", scope("fill")),
    ]
    assert profile.movers([copies, busiest]) == {
        "fill fetch": {"milliseconds": 4.0, "hidden": 0.75},
        "backward add": {"milliseconds": 4.0, "hidden": 0.0},
    }
