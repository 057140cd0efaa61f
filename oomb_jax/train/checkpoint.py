"""Checkpoints: saved in the background, committed whole or not at all, verified bit for bit when restored."""

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

from oomb_jax.plan.memory import SAVED_BESIDE, SAVED_WHOLE
from oomb_jax.train.leaves import by_name, checksums, differing_leaves, like, some, with_sharding, without_keys
from oomb_jax.train.streaming import StreamingHandler

_FORMAT = 1
_UNFINISHED = "*.orbax-checkpoint-tmp*"  # what orbax calls a step until it is complete


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or restored. The message says what stands and what to do."""


class Checkpoints:
    """The checkpoints of one run, in one directory: the last `keep`, and the one with the lowest held-out loss.

        with Checkpoints(directory, keep=3) as checkpoints:
            checkpoints.save(step, {"model": model, "optimizer": state}, {"seed": 0}, loss=2.9)
            ...
        state, metadata = checkpoints.restore(abstract)

    Files are written in the background. A state of up to `whole` bytes is copied to the host before `save` returns, so
    the caller may donate it. A larger one goes through the host array by array, each copied when the one before is
    written: the most that it takes there is its largest array, and the caller may read it, but must not donate it
    before `wait_copied`.

    Files go to a temporary directory that is renamed when it is complete, and older checkpoints are removed only then:
    whenever the process dies, the last finished checkpoint is whole. What an unfinished save left is removed by the
    next run.

    A state is any pytree of JAX arrays. It is stored as a flat table of dotted leaf names with shape, dtype and a
    checksum, independent of the classes of the tree.

    Only one process may hold a directory; the operating system ends its hold when it dies.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3, whole: int = SAVED_WHOLE):
        """Opens `directory`, creating it if need be, and removes leftovers of unfinished saves.

        Raises:
            ValueError: `keep` is below 1.
            CheckpointError: another process holds the directory, or it cannot be used.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the last checkpoint is kept, so 1 or more")
        self._keep, self._whole = keep, whole
        self._streaming = False
        self._directory = Path(directory).absolute()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._directory, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self._directory}: no directory for checkpoints ({_line(error)})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise CheckpointError(
                f"{self._directory}: another process saves its checkpoints here; stop it or use another directory"
            ) from error
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self._saving: int | None = None
        self._losses: dict[int, float | None] = {}
        self._manager = self._open()

    def save(self, step: int, state: PyTree, metadata: Mapping[str, Any], *, loss: float | None = None) -> None:
        """Saves `state` as the checkpoint of `step`, after waiting for the save before.

        Args:
            step: larger than that of every checkpoint so far.
            state: pytree of JAX arrays.
            metadata: anything JSON holds; given back by `restore`.
            loss: held-out loss by which the best checkpoint is kept. None: it cannot be the best.

        Raises:
            ValueError: `step` is not larger than the latest.
            CheckpointError: the save before failed, or the disk has too little space. Older checkpoints stand.
        """
        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step={step}: step {latest} is saved in {self._directory}; save steps in rising order")
        named = by_name(state)
        arrays = without_keys(named)
        self._streaming = sum(x.nbytes for x in arrays.values()) > self._whole
        self._clear()
        size = sum(x.nbytes for x in arrays.values()) + SAVED_BESIDE
        free = shutil.disk_usage(self._directory).free
        if free < size:
            raise CheckpointError(
                f"step {step} takes {_mib(size)} and {self._directory} has {_mib(free)} free; {self._standing()}; "
                f"free {_mib(size - free)} more, or save on another disk"
            )
        sums = jax.device_get(checksums(arrays))
        about = {
            "format": _FORMAT,
            "leaves": {name: [str(x.dtype), list(x.shape), int(sums[name])] for name, x in named.items()},
            # NaN compares with nothing.
            "loss": None if loss is None or math.isnan(loss) else loss,
            "metadata": dict(metadata),
        }
        about["crc32"] = _crc32(about)
        self._saving = step
        self._losses[step] = about["loss"]
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), about=ocp.args.JsonSave(about)),
                force=True,
            )
        except Exception as error:
            self._fail(error)

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError: the save failed. Its files are removed, older checkpoints stand, and later saves may work.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
        self._saving, self._streaming = None, False

    def wait_copied(self) -> None:
        """Returns when the state that was saved last may be donated.

        Raises:
            CheckpointError: as of `wait`.
        """
        if self._streaming:
            self.wait()

    def close(self) -> None:
        """Waits, and lets go of the directory.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._manager.close()
            os.close(self._lock)

    def __enter__(self) -> "Checkpoints":
        """The same as the object itself; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Closes. A failed save is raised, or noted on the error that left the block."""
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"and {failed}")

    def steps(self) -> tuple[int, ...]:
        """Steps of the finished checkpoints, rising."""
        return tuple(step for step in sorted(self._manager.all_steps()) if self._path(step).is_dir())

    def latest(self) -> int | None:
        """Step of the last finished checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Step of the finished checkpoint with the lowest held-out loss; None if none has one."""
        return _best(self._losses, self.steps())

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata saved with `step`.

        Raises:
            CheckpointError: there is no such checkpoint, or its metadata cannot be read.
        """
        return self._about(step)["metadata"]

    def restore(
        self, abstract: PyTree, step: int | None = None, expect: Mapping[str, Any] | None = None
    ) -> tuple[PyTree, dict[str, Any]]:
        """The state of a checkpoint, bit for bit, and its metadata.

        Args:
            abstract: a tree like the saved one, of arrays or `jax.ShapeDtypeStruct`. A leaf's sharding says where it
                goes; without one, to the default device.
            step: which checkpoint; None: the latest. Nothing falls back to an older one by itself.
            expect: entries that the metadata must have, at any depth; what it has beyond them is not compared.

        Raises:
            CheckpointError: there is no such checkpoint, it is of another model or run (every difference is named), or
                it is damaged (the step before it is named).
        """
        self.wait()
        if step is None:
            step = self.latest()
            if step is None:
                raise CheckpointError(f"{self._directory}: no finished checkpoint; start without resuming")
        about = self._about(step)
        wanted = by_name(abstract)
        differences = differing_leaves(wanted, about["leaves"])
        differences += _differing_entries(json.loads(json.dumps(dict(expect or {}))), about["metadata"])
        if differences:
            raise CheckpointError(
                f"{self._path(step)} is a checkpoint of something else: {'; '.join(differences)}; "
                "resume with the settings it was made with, or start in another directory"
            )
        plain = {name: with_sharding(x) for name, x in without_keys(wanted).items()}
        try:
            # Arrays are read at once up to a limit, which must be above the largest.
            gigabytes = math.ceil(max(x.size * x.dtype.itemsize for x in plain.values()) / 1e9) + 1
            with ocp.Checkpointer(self._state_handler(gigabytes)) as reader:
                restored = reader.restore(
                    self._path(step) / "state",
                    args=ocp.args.PyTreeRestore(plain, restore_args=ocp.checkpoint_utils.construct_restore_args(plain)),
                )
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # orbax raises plain ones too
            raise self._damaged(step, _line(error)) from error
        sums = jax.device_get(checksums(restored))
        wrong = [name for name, entry in about["leaves"].items() if int(sums[name]) != entry[2]]
        if wrong:
            raise self._damaged(step, f"other bits than were saved in {some(wrong)}")
        leaves = [like(restored[name], x) for name, x in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves), about["metadata"]

    def _open(self) -> ocp.CheckpointManager:
        self._clear()
        handlers = {"state": self._state_handler(), "about": ocp.JsonCheckpointHandler()}
        policies = [keep_policy.LatestN(self._keep), _KeepBest(self._losses)]
        options = ocp.CheckpointManagerOptions(preservation_policy=keep_policy.AnyPreservationPolicy(policies))
        manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)
        self._losses.clear()
        for step in manager.all_steps():
            # A damaged checkpoint is not the best; `restore` says what is wrong with it.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._losses[step] = _read(manager, step)["loss"]
        return manager

    def _state_handler(self, restore_gb: int | None = None) -> ocp.PyTreeCheckpointHandler:
        handler = StreamingHandler(self._whole)
        return ocp.PyTreeCheckpointHandler(
            # Trained weights hardly compress, and the bytes on disk should be those that were checked for space.
            use_compression=False,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, handler)),
            # What the process may pin is the pools'.
            enable_pinned_host_transfer=False,
            restore_concurrent_gb=restore_gb,
        )

    def _clear(self) -> None:
        for path in self._directory.glob(_UNFINISHED):
            # After a failed save its other arrays may still be on their way; what they leave goes with the next call.
            shutil.rmtree(path, ignore_errors=True)

    def _fail(self, error: Exception) -> None:
        step, self._saving, self._streaming = self._saving, None, False
        # A manager whose save failed keeps the failed step in its list; a new one reads the disk and clears leftovers.
        self._manager.close()
        self._manager = self._open()
        raise CheckpointError(
            f"saving step {step} in {self._directory} failed ({_line(error)}); {self._standing()}"
        ) from error

    def _about(self, step: int) -> dict[str, Any]:
        if step not in self.steps():
            raise CheckpointError(f"{self._directory}: no checkpoint of step {step}; {self._standing()}")
        try:
            about = _read(self._manager, step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(step, _line(error)) from error
        if about["format"] != _FORMAT:
            raise CheckpointError(
                f"{self._path(step)} has format {about['format']} and this version reads format {_FORMAT}; "
                "resume with the version it was made with"
            )
        return about

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        before = max((s for s in self.steps() if s < step), default=None)
        way_out = "there is none before it" if before is None else f"the one before it is step {before}: ask for it"
        return CheckpointError(f"{self._path(step)} is damaged ({reason}); {way_out}")

    def _standing(self) -> str:
        return f"finished checkpoints: {', '.join(map(str, self.steps())) or 'none'}"

    def _path(self, step: int) -> Path:
        return self._directory / str(step)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """orbax logs pages of tracebacks for an error that it also raises, and that is reported here in one line."""
    return "orbax" not in record.pathname


class _KeepBest(keep_policy.PreservationPolicy):
    """Keeps the checkpoint with the lowest of `losses`, which may change between calls."""

    def __init__(self, losses: Mapping[int, float | None]):
        self._losses = losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = _best(self._losses, [checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]


def _best(losses: Mapping[int, float | None], steps: Sequence[int]) -> int | None:
    known = {step: loss for step in steps if (loss := losses.get(step)) is not None}
    return min(known, key=lambda step: known[step], default=None)


def _read(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
    if about.pop("crc32") != _crc32(about):
        raise ValueError("other metadata than were saved")
    return about


def _crc32(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _differing_entries(wanted: Any, saved: Any, path: str = "") -> list[str]:
    if isinstance(wanted, dict) and isinstance(saved, dict):
        return [
            line
            for key, value in wanted.items()
            for line in _differing_entries(value, saved.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if wanted == saved else [f"{path} is {saved!r} there and {wanted!r} here"]


def _line(error: BaseException, most: int = 300) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for specification in (" [tensorstore_spec", " See full TensorStore"):
        text = text.split(specification)[0]
    # Both ends: storage errors name the file first and the reason last.
    return text if len(text) <= most else f"{text[: most // 3]} ... {text[-most // 2 :]}"


def _mib(size: int) -> str:
    return f"{math.ceil(size / 2**20):,} MiB"
