"""Tokenise a source once: into a named token file, or into one of the cache.

The cache is the directory given, else `$OOMB_JAX_CACHE`, else `$XDG_CACHE_HOME/oomb_jax`, else `~/.cache/oomb_jax`.
A file of it is used again while the source (paths, sizes, times), the tokenizer and the format are the same. Files that
are no longer used stay until they are deleted; any can be deleted.
"""

import contextlib
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from oomb_jax.train.data.sources import TOKENS, Piece, Source
from oomb_jax.train.data.tokenfile import VERSION, TokenFile, TokenWriter, read_token_file
from oomb_jax.train.data.tokenizer import Tokenizer

_BATCH_BYTES = 4 << 20  # text tokenised together: enough for every core, little against memory
_BATCH_PIECES = 1024
_LINE_SECONDS = 30  # between lines of progress where there is no terminal

_log = logging.getLogger(__name__)


def pack(source: Source, tokenizer: Tokenizer, path: Path) -> TokenFile:
    """Tokenise all of `source` into the token file `path`, replacing it; progress and one closing line go to stderr.

    ValueError: the source cannot be read, holds no text, or changed meanwhile; then `path` is as it was.
    """
    began = time.perf_counter()
    fingerprint = source.fingerprint()
    with TokenWriter(path, tokenizer) as writer, _progress(source) as advance:
        for pieces in _batches(source.pieces()):
            try:
                ids = tokenizer.encode([piece.text for piece in pieces])
            except UnicodeDecodeError as error:
                where = next(piece.where for piece in pieces if piece.text == error.object)
                raise ValueError(
                    f"{where}: not UTF-8 text ({error.reason} in {error.object[error.start :][:20]!r}); "
                    "convert it, or use tokenizer 'bytes'"
                ) from error
            for piece, piece_ids in zip(pieces, ids, strict=True):
                writer.add(piece_ids, ends=piece.ends)
            advance(sum(piece.size for piece in pieces))
        if not writer.documents:
            raise ValueError(f"data={source.name!r}: it is empty; there is nothing to train on")
        if source.fingerprint() != fingerprint:
            raise ValueError(f"data={source.name!r}: it changed while it was read; start again")
    print(
        f"tokenised {source.name}: {writer.tokens:,} tokens, {writer.documents:,} documents, "
        f"{time.perf_counter() - began:.1f} s -> {path}",
        file=sys.stderr,
    )
    return read_token_file(path)


def cached(source: Source, tokenizer: Tokenizer, directory: Path) -> TokenFile:
    """The token file of `source` in the cache `directory`, made if it is not there. Two processes that make the same
    file do the work twice, and both end with a whole file."""
    key = hashlib.sha256(f"{VERSION} {tokenizer.sha256} {source.fingerprint()}".encode()).hexdigest()
    stem = re.sub(r"[^\w.-]+", "-", Path(source.name).name)[-60:]
    path = directory / f"{stem}-{key[:20]}{TOKENS}"
    if path.exists():
        try:
            return read_token_file(path)
        except ValueError as error:
            _log.warning("%s; tokenising again", error)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cache {directory}: cannot be made ({error.strerror}); set OOMB_JAX_CACHE to another") from error
    return pack(source, tokenizer, path)


def cache_directory(given: str | os.PathLike[str] | None) -> Path:
    """Where token files are kept: see the module."""
    if given is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        given = os.environ.get("OOMB_JAX_CACHE") or Path(base, "oomb_jax")
    return Path(given).expanduser()


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _progress(source: Source) -> Iterator[Callable[[float], None]]:
    """A function that is told how much more of `source.size` is done: a bar in a terminal, else a line now and then."""
    from rich.console import Console  # a cached file needs no bar
    from rich.progress import Progress

    console = Console(stderr=True)
    said = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=source.size)

        def advance(size: float) -> None:
            nonlocal said
            progress.advance(task, size)
            if not console.is_terminal and time.perf_counter() - said > _LINE_SECONDS:
                print(f"tokenising {source.name}: {progress.tasks[0].percentage:.0f} %", file=sys.stderr)
                said = time.perf_counter()

        yield advance
