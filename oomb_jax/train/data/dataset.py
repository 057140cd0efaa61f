"""What the training program reads: the documents of each source, split into a training and a held-out view."""

import dataclasses
import functools
import logging
import os

import numpy as np
from jaxtyping import Bool, Float, Int32, Int64, UInt

from oomb_jax.train.data.sources import resolve
from oomb_jax.train.data.spec import Item, parse
from oomb_jax.train.data.store import cache_directory, cached
from oomb_jax.train.data.tokenfile import TokenFile, read_token_file
from oomb_jax.train.data.tokenizer import Tokenizer, load_tokenizer

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Documents of one source in a fixed order, each with its end-of-document id. Ids are addressed by their position
    in all token files of the source laid end to end."""

    name: str
    """What the user called the source, and which part of it this is."""

    arrays: tuple[UInt[np.ndarray, "_"], ...] = dataclasses.field(repr=False)
    """The ids of each token file, memory-mapped."""

    starts: Int64[np.ndarray, " documents"] = dataclasses.field(repr=False)
    """Where each document starts."""

    lengths: Int64[np.ndarray, " documents"] = dataclasses.field(repr=False)
    """Ids of each document."""

    largest_id: int
    """No id may be above it."""

    @functools.cached_property
    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends when these documents alone are laid end to end."""
        return np.cumsum(self.lengths)

    @property
    def tokens(self) -> int:
        """Ids in all documents together."""
        return int(self.ends[-1])

    def take(self, positions: Int64[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
        """The ids at `positions`. ValueError: one is above `largest_id`, so a token file is damaged."""
        if len(self.arrays) == 1:
            ids = self.arrays[0][positions].astype(np.int32)
        else:
            ids = np.empty(len(positions), np.int32)
            bases = np.cumsum([0] + [len(tokens) for tokens in self.arrays])
            owner = np.searchsorted(bases, positions, side="right") - 1
            for i in np.flatnonzero(np.bincount(owner)):
                mine = owner == i
                ids[mine] = self.arrays[i][positions[mine] - bases[i]]
        if ids.min() < 0 or ids.max() > self.largest_id:
            raise ValueError(f"data={self.name!r}: damaged, it holds an id above {self.largest_id}; pack it again")
        return ids


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """The training or the held-out documents of all sources."""

    parts: tuple[Documents, ...]
    """The documents of each source."""

    weights: Float[np.ndarray, " parts"]
    """The probability that a row comes from each; their sum is 1."""

    @property
    def tokens(self) -> int:
        """Ids in all sources together."""
        return sum(part.tokens for part in self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Opened data."""

    train: View
    """Documents to train on."""

    heldout: View | None
    """Documents that training never sees; None if `heldout=0`."""

    tokens: int
    """Ids in all sources together, ends of documents included."""

    vocab_size: int
    """The tokenizer's vocabulary."""

    largest_id: int
    """The largest id that occurs."""

    tokenizer: str
    """The tokenizer's name."""


def open_data(
    data: str = "stdlib",
    *,
    tokenizer: str | None = None,
    heldout: int | float = 0.05,
    cache: str | os.PathLike[str] | None = None,
) -> Data:
    """Open the sources that the string `data` names (grammar: `spec.py`), tokenising what is not in the cache
    (`store.py`).

    `tokenizer` is `bytes`, a `tokenizer.json` or a directory that holds one; None: what the token files were packed
    with, `bytes` for text. Of each source, the share `heldout` of its documents is held out, whole ones at even
    distances; where these would make less than half or more than twice that share of its tokens (few documents, or very
    uneven ones), the end of its text is held out instead. Both depend on the documents alone.

    FileNotFoundError, ImportError (an extra is missing) and ValueError each say in one line what to change.
    """
    if not 0 <= heldout < 1:
        raise ValueError(f"heldout={heldout}: a share of the documents, from 0 up to but not including 1")
    items = parse(data)
    named = None if tokenizer is None else load_tokenizer(tokenizer)
    files = [_token_files(item, named, cache) for item in items]
    headers = [file.header for group in files for file in group]
    _check_tokenizers([file for group in files for file in group], named)
    splits = [_split(item.source, group, heldout) for item, group in zip(items, files, strict=True)]
    weights = np.array([item.weight for item in items])
    weights /= weights.sum()
    held = [part for _, part in splits if part is not None]
    return Data(
        train=View(parts=tuple(part for part, _ in splits), weights=weights),
        heldout=View(parts=tuple(held), weights=weights) if held else None,
        tokens=sum(header.tokens for header in headers),
        vocab_size=max(header.vocab_size for header in headers),
        largest_id=max(header.largest_id for header in headers),
        tokenizer=headers[0].tokenizer,
    )


def check_vocabulary(data: Data, vocab_size: int) -> None:
    """ValueError: `data` holds ids that a model of `vocab_size` tokens does not know."""
    if data.largest_id >= vocab_size:
        raise ValueError(
            f"vocabulary of {vocab_size:,}: too small for the data, whose largest id is {data.largest_id:,} "
            f"(tokenizer {data.tokenizer!r}); take the model's own tokenizer, or a model of at least "
            f"{data.largest_id + 1:,} tokens"
        )


def _token_files(item: Item, tokenizer: Tokenizer | None, cache: str | os.PathLike[str] | None) -> list[TokenFile]:
    source, paths = resolve(item)
    files = [read_token_file(path) for path in paths]
    if source is not None:
        files.append(cached(source, tokenizer or load_tokenizer("bytes"), cache_directory(cache)))
    return files


def _check_tokenizers(files: list[TokenFile], tokenizer: Tokenizer | None) -> None:
    first = files[0].header
    sha256, wanted = first.tokenizer_sha256, f"{first.tokenizer!r} of {files[0].path}"
    if tokenizer is not None:
        sha256, wanted = tokenizer.sha256, f"{tokenizer.name!r} that is asked for"
    for file in files:
        if file.header.tokenizer_sha256 != sha256:
            raise ValueError(
                f"{file.path}: its tokenizer {file.header.tokenizer!r} differs from the {wanted}; pack it again, or "
                "pass the tokenizer that it was packed with"
            )


def _split(name: str, files: list[TokenFile], heldout: int | float) -> tuple[Documents, Documents | None]:
    """The training and the held-out documents of one source."""
    bases = np.cumsum([0] + [file.header.tokens for file in files])
    offsets = [file.offsets.astype(np.int64) + base for file, base in zip(files, bases[:-1], strict=True)]
    starts = np.concatenate([each[:-1] for each in offsets])
    lengths = np.concatenate([np.diff(each) for each in offsets])
    make = functools.partial(
        Documents,
        arrays=tuple(file.tokens for file in files),
        largest_id=max(file.header.largest_id for file in files),
    )
    if heldout == 0:
        return make(name=name, starts=starts, lengths=lengths), None
    held = _evenly(len(starts), heldout)
    share = lengths[held].sum() / lengths.sum()
    if heldout / 2 <= share <= heldout * 2 and not held.all():
        train = make(name=name, starts=starts[~held], lengths=lengths[~held])
        return train, make(name=f"{name}, held out", starts=starts[held], lengths=lengths[held])
    few = f"its documents ({len(starts)}) are too few or too uneven to hold out whole ones"
    _log.warning("data=%r: %s; the last %.3g %% of the text is held out", name, few, 100 * heldout)
    # The document that the cut goes through is in both parts, each time with its own half.
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    cut = total - max(2, round(heldout * total))
    if cut < 2:
        raise ValueError(f"data={name!r}: {total} tokens are too few to hold any out; take more text, or heldout=0")
    skipped = np.clip(cut - (ends - lengths), 0, lengths)
    before, after = skipped > 0, skipped < lengths
    train = make(name=name, starts=starts[before], lengths=skipped[before])
    return train, make(name=f"{name}, held out", starts=(starts + skipped)[after], lengths=(lengths - skipped)[after])


def _evenly(count: int, share: int | float) -> Bool[np.ndarray, " count"]:
    """`share` of `count` places, evenly spread, the first at half a distance."""
    steps = np.floor(np.arange(count + 1) * share + 0.5)
    return np.diff(steps) > 0
