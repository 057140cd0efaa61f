"""Text to token ids: plain bytes, or a `tokenizer.json` of the `tokenizers` library."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>")
"""Tokens that end a document wherever they exist. They go before `eos_token`, which in a chat model ends a turn."""

_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    "chat_template.jinja",
)
"""Files that belong to a tokenizer.json, where they are."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    name: str
    """What the user called it, for messages."""

    sha256: str
    """Hash of everything that decides the ids."""

    vocab_size: int
    """Every id is below this."""

    end_id: int
    """The id after the last token of each document."""

    def encode(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, "_"]]:
        """The ids of each UTF-8 text, without end of document. ValueError: not UTF-8."""
        ...

    def decode(self, ids: Int[np.ndarray, "_"]) -> str:
        """The text of some ids; bytes that are no UTF-8 become the replacement character."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text, 256 ends a document."""

    name = "bytes"
    sha256 = hashlib.sha256(b"bytes, end of document 256").hexdigest()
    vocab_size = 257
    end_id = 256

    def encode(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, "_"]]:
        """See `Tokenizer`. Any bytes will do, UTF-8 or not."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Int[np.ndarray, "_"]) -> str:
        """See `Tokenizer`."""
        return ids[ids < self.end_id].astype(np.uint8).tobytes().decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`. As in `transformers`, text that spells a special token becomes that token; no token is added
    at the start. Its truncation and padding are switched off."""

    def __init__(self, path: Path):
        """Read `path`. ValueError: not a tokenizer, or one without an end-of-document token."""
        import tokenizers  # the default tokenizer does without

        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer={path}: not a tokenizer.json of the tokenizers library ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end = _end_token(path, vocabulary)
        self.name = path.parent.resolve().name if path.name == "tokenizer.json" else path.name
        self.sha256 = hashlib.sha256(content + end.encode()).hexdigest()
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_id = vocabulary[end]

    def encode(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, "_"]]:
        """See `Tokenizer`."""
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Int[np.ndarray, "_"]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a `tokenizer.json`, or a directory that holds one.

    FileNotFoundError: there is none. ValueError: it cannot be used.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = _file(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer={name!r}: no file {path}; pass 'bytes', a tokenizer.json or a directory that holds one"
        )
    return FileTokenizer(path)


def copy_tokenizer(name: str, directory: Path) -> None:
    """Copies what `transformers` reads of a tokenizer, called as for `load_tokenizer`; of bytes there is nothing."""
    if name == "bytes" or (path := _file(name)).parent.resolve() == directory.resolve():
        return
    shutil.copyfile(path, directory / "tokenizer.json")
    for beside in _BESIDE:
        if (file := path.with_name(beside)).is_file():
            shutil.copyfile(file, directory / beside)


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def _end_token(path: Path, vocabulary: dict[str, int]) -> str:
    config = path.with_name("tokenizer_config.json")
    eos = json.loads(config.read_bytes()).get("eos_token") if config.is_file() else None
    if isinstance(eos, dict):  # older files spell a token as an object
        eos = eos.get("content")
    for token in (*_END_TOKENS, eos, "</s>", "<eos>"):
        if token in vocabulary:
            return token
    raise ValueError(
        f'tokenizer={path}: no token to end a document with; name one of its tokens as "eos_token" in {config.name} '
        "beside it"
    )
