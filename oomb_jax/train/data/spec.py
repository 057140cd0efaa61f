"""The one string that names the data.

    data   = source | source "=" weight {"," source "=" weight}
    source = "stdlib"                                    the .py files of the running Python's standard library
           | path ["#" field]                            .txt, .jsonl, .parquet, .tokens, or a directory of these
           | "hf:" name ["@" config] [":" split] ["#" field]    a dataset of the `datasets` library, on disk or a hub

`field` (default `text`) is the JSON field or column that holds the text, `split` is `train` unless named. Weights are
positive and need not sum to 1: each row of a batch takes its source with probability weight / sum of weights. A name
that exists on disk is taken as it is, whatever signs it holds.

    stdlib
    books.txt
    crawl/=0.7,code.jsonl#content=0.3
    hf:Salesforce/wikitext@wikitext-103-raw-v1:train
"""

import dataclasses
import math
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One source of a data string."""

    source: str
    """`stdlib`, a path, or `hf:...`."""

    field: str | None = None
    """The field or column that holds the text; None: `text`."""

    weight: float = 1.0
    """The share of rows that come from here, relative to the other sources."""


def parse(data: str) -> tuple[Item, ...]:
    """The sources of a data string. Nothing is opened. ValueError: the string does not follow the grammar."""
    if _exists(data):
        return (Item(source=data),)
    texts = [text.strip() for text in data.split(",")]
    items = [_item(data, text) for text in texts]
    if len(items) > 1 and any(weight is None for _, weight in items):
        example = ",".join(f"{item.source}={1 / len(items):.2g}" for item, _ in items)
        raise ValueError(f"data={data!r}: each of several sources needs a weight, such as {example}")
    return tuple(dataclasses.replace(item, weight=1.0 if weight is None else weight) for item, weight in items)


def _item(data: str, text: str) -> tuple[Item, float | None]:
    body, weight, field = text, None, None
    if not _exists(body) and "=" in body:
        body, _, tail = body.rpartition("=")
        weight = _weight(data, tail)
    if not _exists(body) and "#" in body:
        body, _, field = body.rpartition("#")
    if body in ("", "hf:") or field == "":
        raise ValueError(f"data={data!r}: {text!r} names no source; write SOURCE, SOURCE#FIELD or SOURCE=WEIGHT")
    return Item(source=body, field=field), weight


def _weight(data: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (0 < weight < math.inf):
        raise ValueError(f"data={data!r}: weight {text!r} is not a number above 0; write SOURCE=0.5, or leave it out")
    return weight


def _exists(text: str) -> bool:
    return bool(text) and Path(text).expanduser().exists()
