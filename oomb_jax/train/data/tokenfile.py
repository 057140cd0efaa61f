"""The token file: documents as ids, read back as memory maps.

bytes 0..4095   the line `oomb-tokens`, one JSON object (the fields of `Header`), spaces, a newline
from 4096       `tokens` ids, little-endian, of `dtype`; every document ends with `end_id`
then            zeros up to a multiple of 8 bytes
then            `documents` + 1 offsets, uint64 little-endian: where each document starts; the last equals `tokens`
"""

import array
import dataclasses
import json
import os
import secrets
import zlib
from collections.abc import Buffer
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from jaxtyping import Integer, UInt, UInt64

from oomb_jax.train.data.tokenizer import Tokenizer

VERSION = 1
"""Version of the format; a file of another is refused."""

_MAGIC = b"oomb-tokens\n"
_HEADER_BYTES = 4096
_BUFFER = 1 << 20  # ids held back before a write


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a token file says of itself."""

    version: int
    """`VERSION`."""

    dtype: str
    """`uint16`, or `uint32` for a vocabulary above 65,536."""

    tokens: int
    """Ids in the file, ends of documents included."""

    documents: int
    """Documents in the file; none is empty."""

    vocab_size: int
    """The tokenizer's vocabulary."""

    largest_id: int
    """The largest id that occurs."""

    end_id: int
    """The id that ends each document."""

    tokenizer: str
    """The tokenizer's name when the file was made; only for messages."""

    tokenizer_sha256: str
    """`Tokenizer.sha256`."""

    crc32: int
    """CRC-32 of the ids followed by the offsets."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """An open token file."""

    path: Path
    header: Header
    tokens: UInt[np.ndarray, " tokens"]
    """Memory-mapped ids."""
    offsets: UInt64[np.ndarray, "_"]
    """Memory-mapped starts of the documents, and the end."""

    def verify(self) -> None:
        """Read the whole file. ValueError: its content is not what was written."""
        crc = 0
        for start in range(0, len(self.tokens), _BUFFER):
            crc = zlib.crc32(self.tokens[start : start + _BUFFER], crc)
        if zlib.crc32(self.offsets, crc) != self.header.crc32:
            raise ValueError(f"{self.path}: damaged, its checksum does not match; pack it again")


class TokenWriter:
    """Write a token file document by document. It appears under its name, whole, when the `with` block ends well; after
    an error nothing is left. Readers and other writers of the same name are never disturbed."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        """Prepare to write `path`, whose directory is made."""
        self._path = path
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._offsets = array.array("Q", [0])
        self._buffer: list[np.ndarray] = []
        self._buffered = self._tokens = self._largest = self._crc = 0

    @property
    def tokens(self) -> int:
        """Ids added so far."""
        return self._tokens

    @property
    def documents(self) -> int:
        """Documents that ended so far."""
        return len(self._offsets) - 1

    def add(self, ids: Integer[np.ndarray, "_"], *, ends: bool) -> None:
        """Add a piece of a document, the last one if `ends`. A document without ids leaves no trace."""
        if ends and (len(ids) or self._tokens > self._offsets[-1]):
            ids = np.append(ids.astype(self._dtype), self._dtype.type(self._tokenizer.end_id))
            self._offsets.append(self._tokens + len(ids))
        self._tokens += len(ids)
        self._buffer.append(ids)
        self._buffered += len(ids)
        if self._buffered >= _BUFFER:
            self._flush()

    def __enter__(self) -> "TokenWriter":
        """Open a temporary file beside the target."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self._file: IO[bytes] = self._temporary.open("xb")
        self._file.write(bytes(_HEADER_BYTES))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish and rename, or remove what there is."""
        try:
            with self._file:
                if error is None:
                    self._finish()
            if error is None:
                self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._buffered:
            ids = np.concatenate(self._buffer).astype(self._dtype)
            self._largest = max(self._largest, int(ids.max()))
            self._crc = zlib.crc32(ids, self._crc)
            self._write(ids)
        self._buffer, self._buffered = [], 0

    def _write(self, content: Buffer) -> None:
        try:
            self._file.write(content)
        except OSError as error:
            error.filename = str(self._path)  # a full disk: say where
            raise

    def _finish(self) -> None:
        self._flush()
        assert self._offsets[-1] == self._tokens, "the last document was not ended"
        offsets = np.array(self._offsets, "<u8")
        self._write(bytes(-self._file.tell() % 8))
        self._write(offsets)
        header = Header(
            version=VERSION,
            dtype=f"uint{8 * self._dtype.itemsize}",
            tokens=self._tokens,
            documents=self.documents,
            vocab_size=self._tokenizer.vocab_size,
            largest_id=self._largest,
            end_id=self._tokenizer.end_id,
            tokenizer=self._tokenizer.name,
            tokenizer_sha256=self._tokenizer.sha256,
            crc32=zlib.crc32(offsets, self._crc),
        )
        text = _MAGIC + json.dumps(dataclasses.asdict(header)).encode()
        self._file.seek(0)
        self._file.write(text.ljust(_HEADER_BYTES - 1) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_token_file(path: Path) -> TokenFile:
    """Map a token file. ValueError: it is none, of another version, cut short or damaged. Ids are not read here: see
    `TokenFile.verify`."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if not start.startswith(_MAGIC):
        raise ValueError(f"{path}: not a token file; make one with `python -m oomb_jax.train.data pack`")
    header = _header(path, start[len(_MAGIC) :])
    dtype = np.dtype(header.dtype).newbyteorder("<")
    offsets_at = _HEADER_BYTES + -(-header.tokens * dtype.itemsize // 8) * 8
    due = offsets_at + 8 * (header.documents + 1)
    if size != due:
        raise ValueError(f"{path}: damaged, it has {size:,} bytes where {due:,} are due; pack it again")
    # asarray: slices of a plain array cost a tenth of slices of np.memmap.
    tokens = np.asarray(np.memmap(path, dtype, "r", _HEADER_BYTES, (header.tokens,)))
    offsets = np.asarray(np.memmap(path, "<u8", "r", offsets_at, (header.documents + 1,)))
    if offsets[0] != 0 or offsets[-1] != header.tokens or not np.all(offsets[1:] > offsets[:-1] + 1):
        raise ValueError(f"{path}: damaged, its documents do not follow one another; pack it again")
    return TokenFile(path=path, header=header, tokens=tokens, offsets=offsets)


def _header(path: Path, text: bytes) -> Header:
    damaged = ValueError(f"{path}: damaged, its header cannot be read; pack it again")
    try:
        values = json.loads(text)
    except ValueError:
        raise damaged from None
    if not isinstance(values, dict):
        raise damaged
    if values.get("version") != VERSION:
        raise ValueError(
            f"{path}: a token file of version {values.get('version')}, this program reads {VERSION}; pack it again"
        )
    fields = dataclasses.fields(Header)
    if values.keys() != {field.name for field in fields} or any(
        type(values[field.name]) is not field.type for field in fields
    ):
        raise damaged
    header = Header(**values)
    if header.dtype not in ("uint16", "uint32") or header.tokens < 1 or header.documents < 1:
        raise damaged
    return header
