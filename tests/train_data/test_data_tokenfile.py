"""Token files and their cache: what is written is read, damage is refused, work is done once."""

import json
import os

import numpy as np
import pytest

from oomb_jax.train.data import open_data, sample
from oomb_jax.train.data import store as store_module
from oomb_jax.train.data.store import cache_directory
from oomb_jax.train.data.tokenfile import TokenWriter, read_token_file
from oomb_jax.train.data.tokenizer import ByteTokenizer


class Wide(ByteTokenizer):
    name = "wide"
    sha256 = "0" * 64
    vocab_size = 200_000
    end_id = 199_999


def write(path, documents, tokenizer):
    with TokenWriter(path, tokenizer) as writer:
        for pieces in documents:
            for i, piece in enumerate(pieces):
                writer.add(piece, ends=i == len(pieces) - 1)


@pytest.mark.parametrize(("tokenizer", "dtype"), [(ByteTokenizer(), "uint16"), (Wide(), "uint32")])
def test_round_trip(tmp_path, monkeypatch, tokenizer, dtype):
    monkeypatch.setattr("oomb_jax.train.data.tokenfile._BUFFER", 100)
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(tokenizer.end_id, size=rng.integers(0, 30)) for _ in range(rng.integers(1, 4))] for _ in range(57)
    ]
    documents += [[np.array([], np.int64)]]
    path = tmp_path / "x.tokens"
    write(path, documents, tokenizer)
    file = read_token_file(path)
    file.verify()
    whole = [np.concatenate(pieces) for pieces in documents]
    whole = [np.append(ids, tokenizer.end_id) for ids in whole if len(ids)]
    np.testing.assert_array_equal(file.tokens, np.concatenate(whole))
    np.testing.assert_array_equal(np.diff(file.offsets), [len(ids) for ids in whole])
    assert file.tokens.dtype == file.header.dtype == dtype
    assert file.header.documents == len(whole) < len(documents)
    assert file.header.largest_id == file.header.end_id == tokenizer.end_id
    assert os.listdir(tmp_path) == ["x.tokens"]


def replace_header(content, **values):
    start = content.index(b"{")
    header = json.loads(content[start:4096])
    header.update(values)
    return content[:start] + json.dumps(header).encode().ljust(4096 - start) + content[4096:]


DAMAGE = {
    "cut short": (lambda c: c[:-1], "damaged, it has .* bytes where .* are due"),
    "cut in the header": (lambda c: c[:100], "damaged, its header"),
    "too long": (lambda c: c + b"\0", "damaged, it has"),
    "empty": (lambda c: b"", "not a token file"),
    "another format": (lambda c: b"PAR1" + c, "not a token file"),
    "header not JSON": (lambda c: c.replace(b'"version"', b'"version', 1), "damaged, its header"),
    "wrong type": (lambda c: replace_header(c, tokens="9"), "damaged, its header"),
    "unknown field": (lambda c: replace_header(c, extra=1), "damaged, its header"),
    "unknown dtype": (lambda c: replace_header(c, dtype="float16"), "damaged, its header"),
    "newer version": (lambda c: replace_header(c, version=2), "version 2, this program reads 1"),
    "offsets": (lambda c: c[:-16] + b"\0" * 8 + c[-8:], "damaged, its documents"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line(tmp_path, damage):
    change, message = DAMAGE[damage]
    path = tmp_path / "x.tokens"
    write(path, [[np.arange(50)], [np.arange(31)]], ByteTokenizer())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"x.tokens: .*{message}") as caught:
        open_data(str(path))
    assert "\n" not in str(caught.value)


def test_damaged_ids_are_found(tmp_path):
    path = tmp_path / "x.tokens"
    write(path, [[np.arange(50)], [np.arange(31)]], ByteTokenizer())
    content = bytearray(path.read_bytes())
    content[4097] = 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x.tokens: damaged, its checksum"):
        read_token_file(path).verify()
    with pytest.raises(ValueError, match="damaged, it holds an id above 256"):
        sample(open_data(str(path), heldout=0).train, seed=0, step=0, batch=1, ctx=82)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.tokens"
    write(path, [[np.arange(5)]], ByteTokenizer())
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not iterable"):
        write(path, [[np.arange(9)], None], ByteTokenizer())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.tokens"]


def test_two_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr("oomb_jax.train.data.tokenfile._BUFFER", 1)
    path = tmp_path / "x.tokens"
    with TokenWriter(path, ByteTokenizer()) as outer:
        outer.add(np.arange(9), ends=True)
        with TokenWriter(path, ByteTokenizer()) as inner:
            inner.add(np.arange(9), ends=True)
            outer.add(np.arange(7), ends=True)
            inner.add(np.arange(7), ends=True)
        first = path.read_bytes()
        read_token_file(path).verify()
    assert path.read_bytes() == first
    assert os.listdir(tmp_path) == ["x.tokens"]


def test_the_cache_is_used_until_something_changes(tmp_path, monkeypatch, caplog):
    made = []
    real = store_module.pack
    monkeypatch.setattr(store_module, "pack", lambda *args: made.append(args) or real(*args))
    cache, text = tmp_path / "cache", tmp_path / "a.txt"

    def first_ids(data):
        return bytes(data.train.parts[0].arrays[0][:3].tolist())

    def open_text():
        return open_data(str(text), heldout=0, cache=cache)

    text.write_text("one")
    open_text()
    assert first_ids(open_text()) == b"one"
    assert len(made) == 1, "two calls, packed once"
    stat = text.stat()
    text.write_text("two")  # the same size: the time tells
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert first_ids(open_text()) == b"two"
    assert len(made) == 2
    monkeypatch.setattr(ByteTokenizer, "sha256", "1" * 64)
    open_text()
    assert len(made) == 3
    for path in cache.iterdir():
        path.write_bytes(b"")
    assert first_ids(open_text()) == b"two"
    assert "not a token file" in caplog.text
    assert "tokenising again" in caplog.text


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("OOMB_JAX_CACHE", raising=False)
    assert str(cache_directory(None)) == "/home/me/.cache/oomb_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_directory(None)) == "/xdg/oomb_jax"
    monkeypatch.setenv("OOMB_JAX_CACHE", "~/mine")
    assert str(cache_directory(None)) == "/home/me/mine"
    assert str(cache_directory("/given")) == "/given"
    text = tmp_path / "a.txt"
    text.write_text("x")
    with pytest.raises(OSError, match=r"a.txt: cannot be made .*set OOMB_JAX_CACHE to another"):
        open_data(str(text), cache=text)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("one")
    real = ByteTokenizer.encode

    def encode(self, texts):
        text.write_text("other")
        return real(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    with pytest.raises(ValueError, match="it changed while it was read"):
        open_data(str(text), cache=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
