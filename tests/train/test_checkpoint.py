import gc
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from orbax.checkpoint._src.serialization import replica_slices

from oomb_jax.train.checkpoint import CheckpointError, Checkpoints
from oomb_jax.train.optimizer import OptimizerConfig, build

REPOSITORY = Path(__file__).parents[2]


class _Linear(nnx.Module):
    def __init__(self, key, dtype, n):
        self.weight = nnx.Param(jax.random.normal(key, (5, n), dtype))


class _Model(nnx.Module):
    def __init__(self, key, n):
        self.embed = _Linear(key, jnp.bfloat16, n)
        self.layers = jax.vmap(lambda k: _Linear(k, jnp.float32, n))(jax.random.split(key, 3))


def _state(seed, n=7):
    key = jax.random.key(seed)
    model = _Model(key, n)
    return {
        "model": model,
        "optimizer": build(OptimizerConfig(), model).init(model),
        "key": jax.random.split(key, 2),
        "other": (jnp.arange(9) > seed, jnp.int8(seed), jax.random.key_data(key), jnp.float16(0.1) * seed),
    }


def _abstract(**arguments):
    return jax.eval_shape(lambda: _state(0, **arguments))


def _data(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert _data(a).tobytes() == _data(b).tobytes()


def _leftovers(directory):
    return [path for path in directory.iterdir() if not path.name.isdigit()]


def _files(directory):
    return sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_state_comes_back_bit_for_bit(tmp_path):
    metadata = {"seed": 3, "model": {"layers": 3, "sizes": [1, 2]}, "note": "é"}
    with Checkpoints(tmp_path / "new" / "directory") as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(0, _state(0), metadata)
    with Checkpoints(str(tmp_path / "new" / "directory")) as checkpoints:
        assert checkpoints.steps() == (0,)
        state, saved = checkpoints.restore(_abstract(), expect={"model": {"layers": 3}})
        assert saved == metadata == checkpoints.metadata(0)
        _assert_equal(state, _state(0))
        # Arrays say the same as shapes.
        _assert_equal(checkpoints.restore(_state(5))[0], _state(0))
    assert len(_files(tmp_path)) < 20


def test_state_may_be_donated_while_it_is_written(tmp_path):
    add = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(5):
            x = jax.block_until_ready(jnp.full((1 << 20,), step, jnp.float32))
            checkpoints.save(step, {"x": x}, {})
            for _ in range(10):
                x = add(x)
            jax.block_until_ready(x)
            state, _ = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}, step)
            np.testing.assert_array_equal(state["x"], step)


def test_a_large_state_goes_through_the_host_array_by_array(tmp_path, monkeypatch):
    """Never are two on the host; the state may be read meanwhile, and donated after `wait_copied`."""
    transfer, copies = replica_slices.transfer_arrays_to_host, []

    def watched(arrays, *args, **kwargs):
        assert len(arrays) == 1
        # A thread that has written one may hold it for another moment.
        until = time.monotonic() + 5
        while any(copy() is not None for copy in copies) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert [copy for copy in copies if copy() is not None] == []
        time.sleep(0.02)
        on_host = transfer(arrays, *args, **kwargs)
        copies.extend(weakref.ref(x.unsliced_data) for array in on_host for x in array.replica_slices)
        return on_host

    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", watched)
    state = _large(1)
    add = jax.jit(lambda x: x + jnp.uint32(1), donate_argnums=0)
    with Checkpoints(tmp_path, whole=1 << 20) as checkpoints:
        checkpoints.save(1, state, {})
        assert len(copies) < 5
        jax.block_until_ready(jax.tree.map(lambda x: 2 * x, state["x"]))
        checkpoints.wait_copied()
        assert len(copies) == 5
        jax.block_until_ready([add(x) for x in state["x"]])
        _assert_equal(checkpoints.restore(jax.eval_shape(lambda: _large(1)))[0], _large(1))
        monkeypatch.undo()
        checkpoints.save(2, {"x": jnp.int32(2)}, {})
        checkpoints.wait_copied()
    # One that can be copied as a whole is read by a run that streams, and the other way round.
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        _assert_equal(checkpoints.restore(jax.eval_shape(lambda: _large(1)), 1)[0], _large(1))


def test_keeps_the_last_and_the_best(tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: float("nan"), 4: 4.0, 5: None, 6: 3.5}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, {"x": jnp.int32(step)}, {}, loss=loss)
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ((2, 5, 6), 6, 2)
    # The best is known to the next run, until another takes its place.
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.best() == 2
        checkpoints.save(7, {"x": jnp.int32(7)}, {}, loss=3.0)
        checkpoints.wait()
        assert checkpoints.steps() == (2, 7)
        checkpoints.save(8, {"x": jnp.int32(8)}, {}, loss=2.0)
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ((8,), 8)


def test_a_checkpoint_of_something_else_is_one_clear_error(tmp_path):
    state = {"a": jnp.ones((2, 3)), "b": jnp.int32(1), "c": jax.random.key(0), "d": jnp.ones((1,))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state, {"model": {"layers": 3, "heads": 2}, "seed": 1})
        abstract = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "b": state["b"], "c": state["b"], "e": state["d"]}
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(abstract, expect={"model": {"layers": 4, "heads": 2}, "tokenizer": "x"})
        message = str(caught.value)
        assert "\n" not in message
        for part in (
            f"{tmp_path}/4 is a checkpoint of something else: it lacks e; it has d too many;",
            "a (float32[2, 3] there, bfloat16[2, 3] here), c (key<fry>[] there, int32[] here);",
            "model.layers is 3 there and 4 here; tokenizer is None there and 'x' here; resume with",
        ):
            assert part in message
        _assert_equal(checkpoints.restore(state, expect={"seed": 1})[0], state)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("part", ["arrays", "metadata"])
def test_a_damaged_checkpoint_is_never_restored(tmp_path, part, damage):
    states = {step: {"x": jax.random.normal(jax.random.key(step), (300, 70))} for step in (1, 2)}
    with Checkpoints(tmp_path) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, state, {"seed": 1})
    file = _files(tmp_path / "2")[-1] if part == "arrays" else tmp_path / "2" / "about" / "metadata"
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[content.index(b'"seed": 1') + 8 if part == "metadata" else len(content) // 2] ^= 2
        file.write_bytes(content)
    else:
        file.unlink()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 2
        with pytest.raises(CheckpointError, match=r"/2 is damaged \(.*\); the one before it is step 1: ask for it"):
            checkpoints.restore(states[2])
        _assert_equal(checkpoints.restore(states[1], step=1)[0], states[1])


def test_a_streamed_save_that_fails_is_reported_where_the_state_is_wanted(tmp_path):
    with Checkpoints(tmp_path, whole=1 << 10) as checkpoints:
        _save_with_a_full_disk(checkpoints, 3)
        with pytest.raises(CheckpointError, match=r"saving step 3 in .* failed \(.*File too large"):
            checkpoints.wait_copied()
        checkpoints.wait_copied()
        assert not _leftovers(tmp_path)


def _save_with_a_full_disk(checkpoints, step):
    """Starts a save that fails in the background, as it does on a full disk: no file may grow beyond a megabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        checkpoints.save(step, {"x": jnp.ones((1 << 20,))}, {})
        deadline = time.monotonic() + 60
        while checkpoints._manager.is_saving_in_progress():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_save_is_reported_and_older_checkpoints_stand(tmp_path):
    small = {"x": jnp.arange(3)}
    message = r"saving step 3 in .* failed \(.*File too large.*\); finished checkpoints: 1, 2"
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, small, {})
    checkpoints.save(2, small, {})
    checkpoints.wait()
    for report in (checkpoints.wait, lambda: checkpoints.save(4, small, {}), lambda: checkpoints.restore(small)):
        _save_with_a_full_disk(checkpoints, 3)
        assert checkpoints.latest() == 2
        with pytest.raises(CheckpointError, match=message):
            report()
        # Reported once; then all goes on.
        checkpoints.wait()
        assert checkpoints.steps() == (1, 2)
        _assert_equal(checkpoints.restore(small)[0], small)
    _save_with_a_full_disk(checkpoints, 3)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.close()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert not _leftovers(tmp_path)
        checkpoints.save(3, small, {})
        checkpoints.wait()
        assert checkpoints.steps() == (2, 3)


def test_a_failed_save_does_not_hide_the_error_of_the_block(tmp_path):
    def block():
        with Checkpoints(tmp_path) as checkpoints:
            _save_with_a_full_disk(checkpoints, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        block()
    assert "saving step 1" in caught.value.__notes__[0]
    assert "finished checkpoints: none" in caught.value.__notes__[0]


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones((4,))}, {})
        checkpoints.wait()
        usage = shutil.disk_usage(tmp_path)._replace(free=3 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        wide = jnp.broadcast_to(jnp.float32(1), (1 << 10,))
        checkpoints.save(2, {"x": wide}, {})
        checkpoints.wait()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
        with pytest.raises(CheckpointError, match=r"step 3 takes 2 MiB and .* has 1 MiB free; .* 1, 2; free 1 MiB"):
            checkpoints.save(3, {"x": wide}, {})
        assert checkpoints.steps() == (1, 2)
        assert not _leftovers(tmp_path)


def test_one_process_holds_a_directory(tmp_path):
    with Checkpoints(tmp_path), pytest.raises(CheckpointError, match="another process saves its checkpoints here"):
        Checkpoints(tmp_path)
    Checkpoints(tmp_path).close()


def test_wrong_calls_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: no directory for checkpoints \(FileExistsError"):
        Checkpoints(tmp_path / "file")
    with pytest.raises(ValueError, match=r"keep=0: at least the last"):
        Checkpoints(tmp_path, keep=0)
    with Checkpoints(tmp_path) as checkpoints:
        state = {"x": jnp.ones((4,))}
        with pytest.raises(CheckpointError, match="no finished checkpoint; start without resuming"):
            checkpoints.restore(state)
        checkpoints.save(2, state, {})
        checkpoints.wait()
        with pytest.raises(ValueError, match=r"step=2: step 2 is saved"):
            checkpoints.save(2, state, {})
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 1; finished checkpoints: 2"):
            checkpoints.restore(state, step=1)
        with pytest.raises(TypeError, match=r"x is a float: a state is made of JAX arrays"):
            checkpoints.save(3, {"x": 1.0}, {})
        with pytest.raises(TypeError, match=r"not JSON serializable"):
            checkpoints.save(3, state, {"dtype": jnp.dtype("float32")})
        assert checkpoints.latest() == 2


def _large(step):
    return {
        "step": jnp.int32(step),
        "x": [jax.random.bits(jax.random.key(4 * step + i), (1 << 21,)) for i in range(4)],
    }


def save_forever(directory):
    """Run by the processes of the next test: saves one checkpoint after another and says which are finished."""
    with Checkpoints(directory, keep=2) as checkpoints:
        for step in itertools.count((checkpoints.latest() or 0) + 1):
            checkpoints.save(step, _large(step), {"step": step})
            checkpoints.wait()
            print(step, flush=True)


def test_death_in_the_middle_of_a_save_loses_nothing_that_was_finished(tmp_path):
    size = sum(x.nbytes for x in jax.tree.leaves(_large(0)))
    deaths = [(0.0, signal.SIGKILL), (0.4, signal.SIGKILL), (0.8, signal.SIGTERM), (0.999, signal.SIGKILL)]
    command = "import sys; from tests.train.test_checkpoint import save_forever; save_forever(sys.argv[1])"
    torn = 0
    for share, death in deaths:
        with subprocess.Popen(
            [sys.executable, "-c", command, tmp_path],
            cwd=REPOSITORY,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            finished = int(process.stdout.readline())
            try:
                while True:
                    unfinished = list(tmp_path.glob("*tmp*"))
                    if unfinished and _size(unfinished[0]) >= share * size:
                        break
                    assert process.poll() is None
            finally:
                process.send_signal(death)
            finished = max([finished, *map(int, process.stdout)])
            assert process.wait() == -death
        torn += bool(_leftovers(tmp_path))
        with Checkpoints(tmp_path) as checkpoints:
            assert not _leftovers(tmp_path)
            latest = checkpoints.latest()
            assert latest is not None
            assert latest >= finished
            state, metadata = checkpoints.restore(jax.eval_shape(lambda: _large(0)))
            assert metadata == {"step": latest}
            _assert_equal(state, _large(latest))
    # The signal may come a little late, but not always.
    assert torn >= 2


def _size(directory):
    """Bytes in a directory that may change or go meanwhile."""
    size = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return size
