"""`python -m oomb_jax.train.data pack` makes a token file, `... show` says what is in one."""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from oomb_jax.train.data.sources import TOKENS, resolve
from oomb_jax.train.data.spec import parse
from oomb_jax.train.data.store import pack as pack_source
from oomb_jax.train.data.tokenfile import read_token_file
from oomb_jax.train.data.tokenizer import load_tokenizer

_SHOWN = 200  # ids of the first document that `show` prints


def pack(*, data: str, out: Path, tokenizer: str = "bytes") -> None:
    """Tokenise one source into a token file.

    Args:
        data: stdlib, a .txt, .jsonl or .parquet file, a directory of these, or hf:NAME[@CONFIG][:SPLIT]; each with
            #FIELD where the text is not in the field `text`.
        out: the file to write, ending in .tokens; one that exists is replaced.
        tokenizer: bytes, a tokenizer.json, or a directory that holds one.
    """
    if out.suffix != TOKENS:
        raise ValueError(f"out={out}: a token file ends in {TOKENS}; write {out.with_suffix(TOKENS)}")
    item, *others = parse(data)
    if others:
        raise ValueError(f"data={data!r}: several sources, but a token file holds one; pack each, and mix the files")
    source, token_files = resolve(item)
    if source is None or token_files:
        raise ValueError(f"data={data!r}: holds token files, which are packed already; name the text alone")
    pack_source(source, load_tokenizer(tokenizer), out)


def show(file: Annotated[Path, tyro.conf.Positional], *, tokenizer: str | None = None) -> None:
    """Print what a token file holds, after checking all of it.

    Args:
        file: the token file.
        tokenizer: what it was packed with, to print its first text; not needed for bytes.
    """
    tokens = read_token_file(file)
    tokens.verify()
    header = tokens.header
    print(f"tokens      {header.tokens:,} ({header.dtype}, {file.stat().st_size / 2**20:,.1f} MiB)")
    print(f"documents   {header.documents:,} (mean {header.tokens / header.documents:,.1f} tokens)")
    print(f"vocabulary  {header.vocab_size:,} (largest id {header.largest_id:,}, end of document {header.end_id:,})")
    print(f"tokenizer   {header.tokenizer} (sha256 {header.tokenizer_sha256[:16]})")
    ids = np.array(tokens.tokens[: min(_SHOWN, int(tokens.offsets[1]) - 1)], np.int32)
    known = load_tokenizer(tokenizer or "bytes")
    if known.sha256 == header.tokenizer_sha256:
        print(f"first text  {known.decode(ids)!r}")
    elif tokenizer is None:
        print(f"first ids   {' '.join(map(str, ids[:20]))} (pass --tokenizer to see text)")
    else:
        raise ValueError(f"tokenizer={tokenizer!r}: not the one that {file} was packed with; name {header.tokenizer!r}")


def main() -> None:
    """Run a subcommand. A mistake of the user ends in one line and exit status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"pack": pack, "show": show}, prog="python -m oomb_jax.train.data", description=__doc__
        )
    except (ImportError, OSError, ValueError) as error:
        sys.exit(_failed(error))


def _failed(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
