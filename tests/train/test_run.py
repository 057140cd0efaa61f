"""Whole runs of the training program: what they write, how they end, and that resuming changes nothing."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import replica_slices
from safetensors import SafetensorError

import oomb_jax
from oomb_jax.train import loop, setup
from oomb_jax.train import step as step_module
from oomb_jax.train.__main__ import USAGE, main, parse
from oomb_jax.train.checkpoint import Checkpoints
from oomb_jax.train.data import Batch
from oomb_jax.train.metrics import read_records
from oomb_jax.train.optimizer import OptimizerConfig, build
from oomb_jax.train.step import Step, compile_step, tree_bytes
from tests.gradients import gradient_error, random_batch, random_model
from tests.tolerance import F32_GRADIENT, GOLDEN_LOSS
from tests.train.runs import final_state, flags

LOSSES = Path(__file__).parents[1] / "golden" / "losses.json"


def test_a_run_learns_and_writes_all_its_files(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(flags(text, out, steps=12, batch=2, eval_every=6, save_every=5, keep=2)) == 0
    records = read_records(out / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 13))
    assert records[-1]["loss"] < 0.75 * records[0]["loss"]
    np.testing.assert_allclose([r["loss"] for r in records], json.loads(LOSSES.read_text()), rtol=GOLDEN_LOSS)
    for name in ("learning_rate", "gradient_norm", "tokens_per_second", "model_flops_per_second", "host_memory"):
        assert all(r[name] > 0 for r in records)
    evaluations = read_records(out / "evaluations.jsonl")
    assert [e["step"] for e in evaluations] == [0, 6, 12]
    assert evaluations[-1]["loss"] < 0.75 * evaluations[0]["loss"]
    assert evaluations[-1]["position_ends"][-1] == 300
    # Positions count by their number of tokens in the mean.
    widths = np.diff([0, *evaluations[-1]["position_ends"]])
    np.testing.assert_allclose(
        np.average(evaluations[-1]["loss_by_position"], weights=widths), evaluations[-1]["loss"], rtol=0.02
    )
    assert all((out / name).stat().st_size > 1000 for name in ("loss.png", "memory.png"))
    with Checkpoints(out / "checkpoints") as checkpoints:
        assert checkpoints.steps() == (10, 12)
    printed = capsys.readouterr().out
    assert "3 chunks of 128" in printed
    assert "held-out loss" in printed
    assert "--resume" in printed
    # The run can be made again from its settings.
    assert parse(["--config", str(out / "settings.json"), "--steps", "20"]) == dataclasses.replace(
        parse(flags(text, out, steps=20, batch=2, eval_every=6, save_every=5, keep=2)), dtype="float32"
    )


@pytest.mark.parametrize(
    ("packed", "ctx", "hbm_layers", "filled"),
    [
        (True, 100, None, [1, 2, 3]),
        (False, 30, None, []),  # a single chunk: no other attends to it
        (False, 60, 0, [1]),  # where pages are fetched, two at a time if there are two
        (True, 100, 1, [2, 3]),
    ],
)
def test_a_step_in_pieces_is_value_and_grad(packed, ctx, hbm_layers, filled):
    rng = np.random.default_rng(1)
    model = random_model(rng, dtype=jnp.float32)
    batch = random_batch(rng, (2, ctx), segments=packed)
    config = oomb_jax.Config(page=8, chunk=32, hbm_layers=hbm_layers)
    optimizer = build(OptimizerConfig(), model)
    step, _ = compile_step(model, optimizer, config, batch=2, ctx=ctx, packed=packed)
    seen = []
    losses, grads, _ = step.gradients(
        model,
        oomb_jax.create_pools(model, ctx, config),
        Batch(
            tokens=np.asarray(batch.tokens),
            labels=np.asarray(batch.labels),
            segments=None if batch.segments is None else np.asarray(batch.segments),
        ),
        lambda *args: seen.append(args[:4]),
    )
    loss, expected, _ = jax.jit(oomb_jax.value_and_grad, static_argnames="config")(
        model, oomb_jax.create_pools(model, ctx, config), batch.tokens, batch.labels, config, batch.segments
    )
    chunks = -(-ctx // config.chunk)
    assert losses.shape == (2, chunks)
    np.testing.assert_allclose(losses.sum(), loss, rtol=F32_GRADIENT)
    error, name = gradient_error(grads, expected)
    assert error <= F32_GRADIENT, name
    assert seen == [
        told
        for b in range(2)
        for told in [
            *(("fill", done, chunks - 1, b) for done in filled),
            *(("reverse", done, chunks, b) for done in range(1, chunks + 1)),
        ]
    ]


@pytest.mark.parametrize("attention", [oomb_jax.Dense(), oomb_jax.TopK(pages=2)], ids=["dense", "topk"])
def test_the_pieces_of_a_step_hold_the_pools_once(attention):
    model = random_model(np.random.default_rng(2), dtype=jnp.float32)
    config = oomb_jax.Config(page=8, chunk=32, attention=attention)
    step, _ = compile_step(model, build(OptimizerConfig(), model), config, batch=1, ctx=200, packed=False)
    pools = tree_bytes(oomb_jax.create_pools(model, 200, config))
    for name in "begin", "fill", "reverse":
        memory = step.pieces[name].memory_analysis()
        assert memory.alias_size_in_bytes >= pools, name
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.1 * pools, name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "qwen2.5-8b"}, "unknown model 'qwen2.5-8b'"),
        ({"ctx": 0}, "ctx=0: at least 1"),
        ({"chunk": 100}, "chunk=100: a chunk is a multiple of page=64; the nearest that fits is 64"),
        ({"data": "no-such-file.txt"}, "no-such-file.txt"),
        ({"weights": "no-such-directory"}, "no-such-directory"),
        ({"platform": "gpu"}, "platform=gpu"),
        ({"trainable": "layers.x_proj.*"}, "matches no parameter"),
        ({"config": "no-such-settings.json"}, "no-such-settings.json: no such file"),
        ({"optimizer": "sgd", "b1": 0.9}, "sgd has no such setting"),
        ({"implementation": "mosaic"}, "implementation='mosaic': "),
    ],
)
def test_what_cannot_run_says_so_in_one_line_and_writes_nothing(text, tmp_path, capsys, more, message):
    if more.get("platform") == "gpu" and jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    out = tmp_path / "run"
    platforms = jax.config.jax_platforms
    try:
        status = main(flags(text, out, **more))
    finally:
        jax.config.update("jax_platforms", platforms)
    *_, error = capsys.readouterr().err.splitlines()  # what came before tells of the tokenised text
    assert status == USAGE
    assert error.startswith("error: ")
    assert message in error
    assert not out.exists()


def test_a_step_that_does_not_fit_in_memory_is_refused(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(setup, "memory_limit", lambda device: 20 * 2**20)
    settings = {"attention": "dense"}  # Top-K takes more than that for its scores alone
    assert main(flags(text, tmp_path / "run", ctx=20_000, **settings)) == USAGE
    error = capsys.readouterr().err
    assert "the largest ctx that fits is" in error
    fits = int(error.rpartition(" ")[2])
    assert 1_000 < fits < 20_000
    assert main(flags(text, tmp_path / "run", ctx=fits, steps=1, heldout=0, **settings)) == 0


def test_evaluation_is_compiled_once(text, tmp_path, monkeypatch):
    traced = []
    evaluate = step_module.evaluate
    monkeypatch.setattr(step_module, "evaluate", lambda *args: traced.append(None) or evaluate(*args))
    assert main(flags(text, tmp_path / "run", eval_every=1)) == 0
    assert len(traced) == 1


def test_evaluation_repeats_no_text_of_any_source(text, tmp_path, capsys):
    """Of a mixture's sources, the one that holds out least counts."""
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:1000])
    assert main(flags(text, tmp_path / "run", data=f"{text}=0.5,{short}=0.5", steps=1)) == 0
    assert "(50 tokens)" in capsys.readouterr().out


def test_a_text_shorter_than_the_context_is_repeated_and_resumes_bit_for_bit(text, tmp_path, capsys, caplog):
    """Held-out text is not: it is evaluated as far as it goes, here with fewer chunks than the context has."""
    text.write_text(text.read_text()[:599])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = {"ctx": 1050, "pages": 2, "heldout": 0.5, "save_every": 2}
    assert main(flags(text, whole, **settings)) == 0
    (warning,) = [record.message for record in caplog.records if "repeated" in record.message]
    assert "its 300 tokens are repeated to fill ctx=1,050, 3.5 times" in warning
    printed = capsys.readouterr().out
    assert "held-out text is not repeated: it is evaluated in sequences of 300 tokens" in printed
    assert "(300 tokens)" in printed
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "4")
    assert main([*flags(text, broken, **settings), "--resume"]) == 0
    losses = [[(r["step"], r["loss"]) for r in read_records(d / "metrics.jsonl")] for d in (whole, broken)]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    assert final_state(whole) == final_state(broken)


def test_tokens_beyond_the_vocabulary_are_refused(text, tmp_path, capsys, monkeypatch):
    small = dataclasses.replace(oomb_jax.models.config("tiny"), vocab_size=100)
    monkeypatch.setattr(oomb_jax.models, "config", lambda name: small)
    assert main(flags(text, tmp_path / "run")) == USAGE
    assert "vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("ctx", "abc", "int"),
        ("steps", 1.5, "int"),
        ("batch", True, "int"),
        ("learning_rate", "1e-3", "float"),
        ("clip", "none", "float"),
        ("dtype", "float16", "Literal['bfloat16', 'float32']"),
        ("trainable", "layers.*", "tuple"),
        ("pack", "no", "bool"),
        ("out", 3, "Path"),
    ],
)
def test_a_settings_file_holds_what_the_flags_take(tmp_path, capsys, name, value, kind):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"model": "tiny", "platform": "cpu", name: value}))
    assert main(["--config", str(path)]) == USAGE
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{name}={json.dumps(value)}: not of the setting's type, " in error
    assert kind in error


def test_weights_of_a_directory_that_ends_texts_otherwise_are_trained(text, tmp_path, capsys):
    """As those of an instruct model under the base model's name."""
    other = dataclasses.replace(oomb_jax.models.config("tiny"), eos_token_id=257)
    model = oomb_jax.models.create(other, key=jax.random.key(5), dtype=jnp.float32)
    oomb_jax.models.save(model, tmp_path / "hf")
    assert main(flags(text, tmp_path / "run", steps=1, weights=tmp_path / "hf")) == 0
    assert "weights from" in capsys.readouterr().out


def test_a_finished_run_says_so_and_keeps_its_settings(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(flags(text, out, steps=2)) == 0
    before = (out / "settings.json").read_text()
    capsys.readouterr()
    assert main([*flags(text, out, steps=2, learning_rate=0.5), "--resume", "--export"]) == 0
    assert "all 2 steps are done; raise --steps to go on" in capsys.readouterr().out
    assert (out / "settings.json").read_text() == before
    assert len(read_records(out / "metrics.jsonl")) == 2
    modes = {path.stat().st_mode for path in (out / "settings.json", *(out / "model").iterdir())}
    assert len(modes) == 1


def test_a_run_tells_when_it_begins_and_ends_and_what_it_chose(text, tmp_path, monkeypatch):
    out, told = tmp_path / "run", []
    monkeypatch.setattr("oomb_jax.train.heartbeat.Heartbeat._write", lambda self, about: told.append(about))
    assert main(flags(text, out, steps=1, pages=1)) == 0
    assert told[0] == {"step": 0, "pass": "begun"}
    assert told[-1] == {"step": 1, "pass": "ended", "status": 0}
    (line,) = read_records(out / "metrics.jsonl")
    assert 0 < line["distinct_pages"] <= 2  # of two query pages
    assert 0 < line["gradient_pages"] <= 4  # those of earlier chunks
    assert 0 < line["attention_share"] < 1
    assert 0 < line["recall"] < 1


def test_an_exported_model_is_the_trained_one(text, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*flags(text, first, steps=3, save_every=0), "--export"]) == 0
    assert main(flags(text, second, steps=1, save_every=0, weights=first / "model")) == 0
    trained = read_records(first / "evaluations.jsonl")[-1]
    assert trained["loss"] != read_records(first / "evaluations.jsonl")[0]["loss"]
    assert read_records(second / "evaluations.jsonl")[0]["loss"] == trained["loss"]


def test_an_exported_model_has_its_tokenizer(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    directory, out = tmp_path / "bytes-bpe", tmp_path / "run"
    directory.mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "model.safetensors").write_text("of another model")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert main([*flags(text, out, steps=1, tokenizer=directory), "--export"]) == 0
    after = {path.name: path.read_bytes() for path in (out / "model").iterdir()}
    assert set(after) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert after["model.safetensors"] != before["model.safetensors"]
    # A tokenizer that lies there already stays.
    assert main([*flags(text, out, steps=2, tokenizer=out / "model"), "--resume", "--export"]) == 0
    assert (out / "model" / "tokenizer.json").read_bytes() == before["tokenizer.json"]


def test_an_export_that_cannot_be_written_is_told_and_made_when_the_run_is_resumed(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"

    def full(tensors, path, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr("oomb_jax.models.hf.save_file", full)
        assert main([*flags(text, out, steps=1), "--export"]) == loop.FAILED
    assert "error: not exported: " in (printed := capsys.readouterr().out)
    assert "No space left on device (os error 28); write it with: " in printed
    assert json.loads((out / "heartbeat.json").read_text())["status"] == loop.FAILED
    assert not list((out / "model").iterdir())
    assert main(["--config", str(out / "settings.json"), "--resume"]) == 0
    assert {path.name for path in (out / "model").iterdir()} == {"config.json", "model.safetensors"}
    (other := tmp_path / "other").mkdir()
    (other / "model").touch()
    assert main([*flags(text, other), "--export"]) == USAGE
    assert f"{other / 'model'} is not a directory" in capsys.readouterr().err


def test_a_second_run_does_not_overwrite_the_first(text, tmp_path, capsys):
    out = tmp_path / "run [new]"  # what stands in brackets is no markup
    assert main(flags(text, out, steps=1)) == 0
    assert f"out  {out}\n" in capsys.readouterr().out
    before = (out / "metrics.jsonl").read_bytes()
    assert main(flags(text, out, steps=1)) == USAGE
    assert "holds a run that is saved at step 1" in capsys.readouterr().err
    assert main([*flags(text, tmp_path / "other"), "--resume"]) == USAGE
    assert "no finished checkpoint" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_run_without_checkpoints_does_not_overwrite_a_model(text, tmp_path, capsys):
    command = [*flags(text, tmp_path / "run", steps=1, save_every=0), "--export"]
    assert main(command) == 0
    model = tmp_path / "run" / "model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    assert main([*command, "--seed", "1"]) == USAGE
    assert f"{model} holds a trained model; move it away, or use another --out" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    model.rename(tmp_path / "moved")
    assert main(command) == 0


def test_a_state_that_is_streamed_to_the_disk_is_not_updated_meanwhile(text, tmp_path, monkeypatch):
    """The next step's gradient may be, and is."""
    assert main(flags(text, tmp_path / "whole", steps=3, save_every=1)) == 0
    opened, events = [], []
    gradients, update = Step.gradients, Step.update

    def saving():
        (checkpoints,) = opened
        return checkpoints._manager.is_saving_in_progress()

    def open_streaming(directory, **options):
        opened.append(Checkpoints(directory, **options, whole=1))
        return opened[-1]

    def slow(*args, **kwargs):
        time.sleep(0.02)
        return transfer(*args, **kwargs)

    transfer = replica_slices.transfer_arrays_to_host
    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", slow)
    monkeypatch.setattr(loop, "Checkpoints", open_streaming)
    monkeypatch.setattr(Step, "gradients", lambda *args: events.append(("gradients", saving())) or gradients(*args))
    monkeypatch.setattr(Step, "update", lambda *args: events.append(("update", saving())) or update(*args))
    assert main(flags(text, tmp_path / "streamed", steps=3, save_every=1)) == 0
    meanwhile = [("gradients", True), ("update", False)]
    assert events == [("gradients", False), ("update", False), *meanwhile, *meanwhile]
    assert final_state(tmp_path / "streamed") == final_state(tmp_path / "whole")


def test_a_checkpoint_of_another_model_is_refused(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(flags(text, out, steps=1)) == 0
    saved = json.loads((out / "settings.json").read_text())
    assert saved["ctx"] == 300
    assert main([*flags(text, out, optimizer="lion"), "--resume"]) == USAGE
    assert "checkpoint of something else" in capsys.readouterr().err
