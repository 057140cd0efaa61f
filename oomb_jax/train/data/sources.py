"""Where text comes from: files and datasets, read piece by piece so that memory does not grow with the input."""

import hashlib
import importlib
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from oomb_jax.train.data.spec import Item

TOKENS = ".tokens"
"""Ending of a token file."""

_PIECE = 1 << 20  # bytes of a text file that are tokenised together
_ROWS = 256  # rows of a table that are decoded together
_NO_STDLIB_TEXT = frozenset(("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"))
"""Directories of the standard library that are not read: what others installed, tests (absent on some machines), and
generated tables."""

_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A part of a document, or all of it."""

    where: str
    """File and line or row, for messages."""

    text: bytes
    """UTF-8, unless a `.txt` file holds something else."""

    ends: bool
    """Whether the document ends here."""

    size: float
    """What it takes off the source's `size`."""


@runtime_checkable
class Source(Protocol):
    """Documents of text in a fixed order."""

    name: str
    """What the user called it, for messages."""

    size: float
    """The sum of the pieces' sizes: how much there is to do."""

    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """All documents. ValueError: a record cannot be read (names the file and the line or row)."""
        ...


class FileSource:
    """Documents of `.txt` files (one each), `.jsonl` files (one a line) and `.parquet` files (one a row)."""

    def __init__(self, name: str, files: list[Path], field: str):
        """Read `files` in their order."""
        self.name = name
        self.size = float(sum(path.stat().st_size for path in files))
        self._files = files
        self._field = field

    def fingerprint(self) -> str:
        """See `Source`: paths, sizes and times of the files."""
        stats = [(os.path.abspath(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in self._files]
        return hashlib.sha256(json.dumps([self._field, stats]).encode()).hexdigest()

    def pieces(self) -> Iterator[Piece]:
        """See `Source`."""
        for path in self._files:
            yield from _READERS.get(path.suffix, _read_text)(path, self._field)


class HubSource:
    """Documents of a dataset of the `datasets` library, one a row."""

    def __init__(self, name: str, field: str):
        """Open `name` = `hf:NAME[@CONFIG][:SPLIT]`. ImportError: no `datasets`. ValueError: it cannot be opened."""
        datasets = _extra("datasets", name)
        path, _, split = name.removeprefix("hf:").partition(":")
        path, _, config = (path, "", "") if Path(path).expanduser().exists() else path.partition("@")
        self.name = name
        self._field = field
        try:
            self._dataset = _open_dataset(datasets, Path(path).expanduser(), config or None, split or None)
        except (OSError, ValueError) as error:  # the library's own errors, a missing network too, are among these
            raise ValueError(f"data={name!r}: cannot be opened: {' '.join(str(error).split())}") from error
        _check_column(name, field, self._dataset.column_names)
        self.size = float(len(self._dataset))

    def fingerprint(self) -> str:
        """See `Source`: the library's own."""
        return f"{self._dataset._fingerprint} {self._field}"

    def pieces(self) -> Iterator[Piece]:
        """See `Source`."""
        row = 0
        for rows in self._dataset.select_columns([self._field]).iter(batch_size=_ROWS):
            for text in rows[self._field]:
                yield _record(text, f"{self.name} row {row}", 1.0)
                row += 1


def resolve(item: Item) -> tuple[Source | None, list[Path]]:
    """The text of a source, if it has any, and its token files.

    FileNotFoundError: it is not there. ImportError: an extra is missing. ValueError: nothing in it can be read.
    """
    name, field = item.source, item.field or "text"
    path = Path(name).expanduser()
    if name.startswith("hf:"):
        return HubSource(name, field), []
    if item.field and (name == "stdlib" or path.suffix in (".txt", TOKENS)):
        raise ValueError(f"data={name!r}: has no fields, so '#{item.field}' means nothing here; leave it out")
    if name == "stdlib":
        return FileSource(name, _stdlib_files(), field), []
    if path.is_dir():
        files = _directory_files(path)
    elif not path.exists():
        raise FileNotFoundError(f"data={name!r}: no such file; pass 'stdlib', a path or 'hf:NAME'")
    elif path.suffix not in _ENDINGS:
        raise ValueError(f"data={name!r}: unknown ending {path.suffix!r}; one of {', '.join(_ENDINGS)} or a directory")
    else:
        files = [path]
    texts = [file for file in files if file.suffix != TOKENS]
    tokens = [file for file in files if file.suffix == TOKENS]
    return FileSource(name, texts, field) if texts else None, tokens


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata holds paths of the machine that Python was built on.
    files = [
        path
        for path in _walk(root, _NO_STDLIB_TEXT)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise ValueError(f"data='stdlib': no .py files under {root}; pass a text file instead")
    return files


def _directory_files(root: Path) -> list[Path]:
    files = _walk(root)
    known = [path for path in files if path.suffix in _ENDINGS]
    if not known:
        raise ValueError(f"data='{root}': no file under it ends in {', '.join(_ENDINGS)}")
    if len(known) < len(files):
        _log.warning("data='%s': %d files of other endings are left out", root, len(files) - len(known))
    return known


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """The files under `root`, sorted by relative path, but for hidden ones and those in directories named `skipped`."""
    found = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".") and name not in skipped]
        found += [Path(directory, file) for file in files if not file.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_text(path: Path, field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        # A piece ends with a line, or after _PIECE more bytes without one, but never inside a UTF-8 character.
        while text := file.read(_PIECE) + file.readline(_PIECE):
            for _ in range(3):
                if (following := file.peek(1)[:1]) and following[0] & 0xC0 == 0x80:
                    text += file.read(1)
            yield Piece(str(path), text, not file.peek(1), float(len(text)))


def _read_jsonl(path: Path, field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: not a JSON object")
            _check_column(where, field, list(record))
            yield _record(record[field], where, float(len(line)))


def _read_parquet(path: Path, field: str) -> Iterator[Piece]:
    parquet = _extra("pyarrow.parquet", str(path))
    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:
        raise ValueError(f"{path}: not a parquet file ({error})") from error
    with file:
        _check_column(str(path), field, file.schema_arrow.names)
        size = path.stat().st_size / max(1, file.metadata.num_rows)
        row = 0
        for rows in file.iter_batches(batch_size=_ROWS, columns=[field]):
            for text in rows.column(0).to_pylist():
                yield _record(text, f"{path} row {row}", size)
                row += 1


_READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
_ENDINGS = (*_READERS, TOKENS)


def _open_dataset(datasets: ModuleType, path: Path, config: str | None, split: str | None) -> Any:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():  # written by save_to_disk
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            if split is not None:
                raise ValueError(f"it was saved without splits; leave out ':{split}'")
            return saved
        if (split or "train") not in saved:
            raise ValueError(f"no split {split or 'train'!r}; it has {', '.join(saved)}")
        return saved[split or "train"]
    return datasets.load_dataset(str(path), config, split=split or "train")


def _check_column(where: str, field: str, names: list[str]) -> None:
    if field not in names:
        has = ", ".join(repr(name) for name in names) or "no fields"
        raise ValueError(f"{where}: no field {field!r}, it has {has}; name the one with the text as SOURCE#FIELD")


def _record(text: Any, where: str, size: float) -> Piece:
    if not isinstance(text, str):
        raise ValueError(f"{where}: the text is {'null' if text is None else type(text).__name__}, not a string")
    try:
        return Piece(where, text.encode(), True, size)
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: the text holds half a character, {error.object[error.start]!r}") from error


def _extra(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"data={name!r} needs {package}, which is not installed; install the extra: pip install 'oomb_jax[hf]'"
        ) from error
