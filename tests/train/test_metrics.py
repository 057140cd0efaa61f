import dataclasses
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from oomb_jax.train import metrics, plots
from oomb_jax.train.metrics import MetricsWriter, read_records
from tests.train.runs import FACTS


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write_run(writer, steps):
    for step in steps:
        writer.write(
            step, {"loss": 5 / step, "seconds": 2.0, "tokens_per_second": 1000.0 + step, "host_memory": 7 << 30}
        )
        if step % 3 == 0:
            writer.write_evaluation(step, loss=6 / step, position_ends=[8, 64, 512], loss_by_position=[3.0, 2.0, 1.0])


def test_lines_are_strict_json_and_read_back_as_written(tmp_path):
    with MetricsWriter(tmp_path / "new" / "run") as writer:
        writer.write(1, {"loss": jnp.float32(1.5), "gradient_norm": jnp.inf, "learning_rate": np.float64(1e-3), "n": 3})
        writer.write(2, {"loss": jnp.bfloat16(math.nan), "gradient_norm": -math.inf, "share_of_peak": None})
        writer.write_evaluation(2, loss=math.nan, position_ends=[4, 9], loss_by_position=jnp.array([2.0, math.nan]))
        path = writer.directory / "metrics.jsonl"
        lines = path.read_text().splitlines()  # before close: every line is flushed
        assert strict(lines[0]) == {
            **{"step": 1, "loss": 1.5, "gradient_norm": None, "learning_rate": 1e-3, "n": 3},
            "nonfinite": {"gradient_norm": "inf"},
        }
        assert strict(lines[1])["loss"] is None

        first, second = read_records(path)
        assert first["gradient_norm"] == math.inf
        assert "nonfinite" not in first
        assert math.isnan(second["loss"])
        assert second["gradient_norm"] == -math.inf
        assert second["share_of_peak"] is None

        strict((writer.directory / "evaluations.jsonl").read_text())
        (evaluation,) = read_records(writer.directory / "evaluations.jsonl")
        assert evaluation["loss_by_position"][0] == 2.0
        assert math.isnan(evaluation["loss_by_position"][1])
        with pytest.raises(ValueError, match="2 losses by position for 1 position_ends"):
            writer.write_evaluation(3, loss=1.0, position_ends=[4], loss_by_position=[1.0, 2.0])


@pytest.mark.parametrize("resumed_step", [0, 4, 6])
def test_a_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path, resumed_step):
    with MetricsWriter(tmp_path / "whole") as writer:
        write_run(writer, range(1, 10))
    with MetricsWriter(tmp_path / "killed") as writer:
        write_run(writer, range(1, 8))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (tmp_path / "killed" / name).open("ab") as file:
            file.write(b'{"step": 8, "lo\xc3')  # cut inside a character
    assert [record["step"] for record in read_records(tmp_path / "killed" / "metrics.jsonl")] == list(range(1, 8))

    with MetricsWriter(tmp_path / "killed", resumed_step=resumed_step) as writer:
        write_run(writer, range(resumed_step + 1, 10))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    with MetricsWriter(tmp_path / "killed"):
        pass
    assert read_records(tmp_path / "killed" / "metrics.jsonl") == []


def test_a_broken_line_is_named(tmp_path):
    for broken in ("{", "[]", '{"loss": 1}', "3"):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: .*delete the line"):
            MetricsWriter(tmp_path, resumed_step=3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_line_that_cannot_be_written_is_told_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer._metrics.close()
        writer._metrics = open("/dev/full", "a")  # noqa: SIM115 - the writer closes it
        with pytest.raises(OSError, match="No space left"):
            writer.write(1, {"loss": 1.0})


def test_services_are_loaded_only_when_asked_for(tmp_path, monkeypatch):
    for package, name in (("tensorboardX", "tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ValueError, match=rf"^{name}=True needs the package {package}: pip install 'oomb_jax\[{name}\]'"
        ):
            MetricsWriter(tmp_path, tensorboard=name == "tensorboard", wandb=name == "wandb")
    MetricsWriter(tmp_path).close()


def test_services_get_the_finite_scalars_and_learn_of_a_resume(tmp_path, monkeypatch):
    boards, runs = [], []

    class Board:
        def __init__(self, **arguments):
            self.arguments, self.scalars, self.closed = arguments, [], False
            boards.append(self)

        def add_scalar(self, *scalar):
            self.scalars.append(scalar)

        def flush(self):
            pass

        def close(self):
            self.closed = True

    class Run:
        def __init__(self, **arguments):
            self.arguments, self.logged, self.closed = arguments, [], False
            runs.append(self)

        def log(self, values):
            self.logged.append(values)

        def finish(self):
            self.closed = True

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Board))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Run))
    for resumed_step in (None, 1, None):
        with MetricsWriter(tmp_path, resumed_step=resumed_step, tensorboard=True, wandb=True) as writer:
            writer.write(2, {"loss": 1.5, "share_of_peak": None, "gradient_norm": math.nan})
            writer.write_evaluation(2, loss=1.25, position_ends=[4], loss_by_position=[1.0])
    assert [board.arguments["purge_step"] for board in boards] == [None, 2, None]
    assert boards[0].scalars == [("train/loss", 1.5, 2), ("evaluation/loss", 1.25, 2)]
    assert runs[0].logged == [{"step": 2, "train/loss": 1.5}, {"step": 2, "evaluation/loss": 1.25}]
    ids = [run.arguments["id"] for run in runs]
    assert ids[0] == ids[1] != ids[2]
    assert all(service.closed for service in boards + runs)


@dataclasses.dataclass
class FakeDevice:
    platform: str
    device_kind: str
    stats: dict[str, Any] | None = None

    def memory_stats(self) -> dict[str, Any] | None:
        return self.stats


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_peak_flops(kind, teraflops):
    assert metrics.peak_flops(FakeDevice("gpu", kind)) == (teraflops and teraflops * 1e12)


def product_flops(jaxpr: Any) -> float:
    """FLOP of all matrix products in a jaxpr."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            length = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * length * equation.outvars[0].aval.size
        total += sum(product_flops(x.jaxpr) for x in equation.params.values() if isinstance(x, ClosedJaxpr))
    return total


def test_model_flops_is_the_products_of_forward_and_backward():
    T, N, H, D, L = 37, 3, 8, 24, 2

    def loss(h, weights):
        for query, key, value, out in weights:
            q, k, v = (jnp.einsum("td,dnh->nth", h, w) for w in (query, key, value))
            h = jnp.einsum("nth,nhd->td", jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v, out)
        return h.sum()

    weights = [(*jnp.ones((3, D, N, H)), jnp.ones((N, H, D)))] * L
    everything = product_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(jnp.ones((T, D)), weights).jaxpr)
    no_attention = 6.0 * L * 4 * D * N * H * T
    # The mask of a causal model leaves out half of attention's products.
    expected = no_attention + (everything - no_attention) / 2
    sizes = {"parameters": L * 4 * D * N * H, "layers": L, "query_heads": N, "head_dim": H, "tokens": T}
    assert metrics.model_flops(**sizes) == expected
    quarter = metrics.model_flops(**sizes, attention_share=0.25)
    assert quarter == no_attention + (expected - no_attention) / 4


def test_memory():
    cpu = jax.devices("cpu")[0]
    before = metrics.host_memory()
    block = np.ones(1 << 24)  # 128 MiB
    inside = metrics.device_memory(cpu)
    assert inside is not None
    assert inside["peak"] >= inside["in_use"] >= before + block.nbytes * 0.9
    block_bytes = block.nbytes
    del block
    after = metrics.device_memory(cpu)
    assert after is not None
    assert after["peak"] >= before + block_bytes * 0.9 > after["in_use"]

    gpu = FakeDevice("gpu", "NVIDIA H200", {"bytes_in_use": 5, "peak_bytes_in_use": 9, "bytes_limit": 20})
    assert metrics.device_memory(gpu) == {"in_use": 5, "peak": 9}
    assert metrics.device_memory(FakeDevice("gpu", "NVIDIA H200")) is None


def figures(run, monkeypatch):
    """The figures of a run by file name, and the run drawn."""
    seen = {}
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda f, title, path: seen.update({path.name: f}) or save(f, title, path))
    paths = plots.draw(run)
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
    return seen


def test_plots_show_the_numbers_of_the_run(tmp_path, monkeypatch):
    FACTS.save(tmp_path)
    with MetricsWriter(tmp_path) as writer:
        writer.write_evaluation(0, loss=5.5, position_ends=[8, 64, 512], loss_by_position=[6.0, 5.5, 5.0])
        write_run(writer, range(1, 91))
        writer.write(91, {"loss": math.nan})
    drawn = figures(tmp_path, monkeypatch)
    loss, by_position = drawn["loss.png"].axes
    raw, smoothed, held_out, not_finite = loss.lines
    assert list(raw.get_ydata()) == [5 / step for step in range(1, 91)]
    assert list(smoothed.get_ydata())[-1] == 5 / 90
    assert list(held_out.get_xdata()) == list(range(0, 91, 3))
    assert list(not_finite.get_xdata()) == [91, 91]
    assert loss.get_yscale() == "log"  # 5 down to 0.06
    (stairs,) = by_position.patches
    assert list(stairs.get_data().values) == [3.0, 2.0, 1.0]
    assert list(stairs.get_data().edges) == [0, 8, 64, 512]
    assert [label.get_text() for label in by_position.get_legend().texts] == ["after step 90"]
    (memory,) = drawn["memory.png"].axes
    (host,) = memory.lines
    assert set(host.get_ydata()) == {7.0}

    text = plots.summary(tmp_path).plain
    for part in (
        "tiny, 1,234,567 parameters, on cpu",
        "16,384 tokens",
        "91 of 90",
        "5.0000 -> nan",
        "5.5000 -> 0.0667 (after step 90)",
        "1,046 tokens/s",
        "host 7.00 GiB",
        "3:00",
        "metrics.jsonl, evaluations.jsonl, loss.png, memory.png",
        "oomb_jax --resume",
    ):
        assert part in text


def test_plots_of_a_short_run_without_evaluations(tmp_path, monkeypatch, capsys):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            memory = metrics.device_memory(jax.devices("cpu")[0])
            assert memory is not None
            values = {"device_memory_peak": memory["peak"], "device_memory_in_use": memory["in_use"]}
            writer.write(step, {"loss": 3.0 - step / 10, **values, "host_memory": memory["in_use"]})
    drawn = figures(tmp_path, monkeypatch)
    (loss,) = drawn["loss.png"].axes
    assert loss.get_yscale() == "linear"
    # On a CPU the device's memory is the host's: it is shown once.
    labels = [text.get_text().split(" (")[0] for text in drawn["memory.png"].axes[0].get_legend().texts]
    assert labels == ["host, peak", "host, in use"]

    (tmp_path / "loss.png").unlink()
    assert plots.main([str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").exists()
    assert "2.9000 -> 2.7000" in capsys.readouterr().out
    assert plots.main([str(tmp_path / "none")]) == 2
    assert "no step in metrics.jsonl" in capsys.readouterr().err
