"""Sources, tokenizers and the `pack` and `show` commands, and what each says when it cannot."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from oomb_jax.train.data import load_tokenizer, open_data
from oomb_jax.train.data.__main__ import main
from oomb_jax.train.data.spec import Item, parse

END = 256


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OOMB_JAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ids_of(data):
    part = data.train.parts[0]
    return [part.take(np.arange(s, s + n)) for s, n in zip(part.starts, part.lengths, strict=True)]


def texts_of(data):
    return [bytes(ids[:-1].tolist()).decode() for ids in ids_of(data)]


def read(spec, **settings):
    return texts_of(open_data(spec, heldout=0, **settings))


@pytest.fixture
def tokenizer_directory(tmp_path):
    """A tiny byte-level BPE, trained here, whose file asks for truncation that must not happen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end"] * 9, trainer)
    tokenizer.enable_truncation(4)
    directory = tmp_path / "tiny-bpe"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    return directory


def test_grammar(here):
    assert parse("stdlib") == (Item(source="stdlib"),)
    assert parse("a.txt=0.7, dir/=3e-1") == (Item(source="a.txt", weight=0.7), Item(source="dir/", weight=0.3))
    hub = "hf:a/b@c:train[:9]"
    assert parse(f"{hub}#body=2") == (Item(source=hub, field="body", weight=2.0),)
    for name in ("a=1.txt", "a,b.txt", "a#b.jsonl"):
        (here / name).write_text("x")
        assert parse(name) == (Item(source=name),)
    assert parse("a=1.txt=2,a#b.jsonl#f=1") == (
        Item(source="a=1.txt", weight=2.0),
        Item(source="a#b.jsonl", field="f", weight=1.0),
    )


SPEC_ERRORS = {
    "": "names no source",
    "a.txt=1,": "names no source",
    "=1": "names no source",
    "hf:": "names no source",
    "a.jsonl#": "names no source",
    "a.txt,b.txt": "each of several sources needs a weight, such as a.txt=0.5,b.txt=0.5",
    "a.txt=1,b.txt": "each of several sources needs a weight",
    "a.txt=0": "weight '0' is not a number above 0",
    "a.txt=1,b.txt=-2": "weight '-2' is not a number above 0",
    "a.txt=nan": "weight 'nan' is not a number above 0",
    "a.txt=inf": "weight 'inf' is not a number above 0",
    "a.txt=much": "weight 'much' is not a number above 0",
    "stdlib#text": "has no fields, so '#text' means nothing here",
    "no.txt": "no such file",
    "no.txt=1": "no such file",
    "x.csv": "unknown ending '.csv'; one of .txt, .jsonl, .parquet, .tokens or a directory",
    "nothing": "no file under it ends in .txt, .jsonl, .parquet, .tokens",
    "empty.txt": "it is empty",
    "empty.jsonl": "it is empty",
    "rows.jsonl": "rows.jsonl line 3: no field 'text', it has 'body', 'id'; .* SOURCE#FIELD",
    "rows.jsonl#id": "rows.jsonl line 1: no field 'id'",
    "number.jsonl": "number.jsonl line 1: the text is int, not a string",
    "null.jsonl": "null.jsonl line 1: the text is null, not a string",
    "list.jsonl": "list.jsonl line 1: not a JSON object",
    "half.jsonl": "half.jsonl line 1: the text holds half a character",
    "broken.jsonl": "broken.jsonl line 2: not JSON",
}


@pytest.mark.parametrize("spec", SPEC_ERRORS)
def test_mistakes_are_named_in_one_line(here, spec):
    files = {
        "x.csv": "a",
        "empty.txt": "",
        "empty.jsonl": "\n",
        "rows.jsonl": '{"text": "a"}\n\n{"body": "b", "id": 1}\n',
        "number.jsonl": '{"text": 1}',
        "null.jsonl": '{"text": null}',
        "list.jsonl": '["text"]',
        "half.jsonl": '{"text": "\\ud800"}',
        "broken.jsonl": '{"text": "a"}\n{"text": ',
    }
    for name, content in files.items():
        (here / name).write_text(content)
    (here / "nothing").mkdir()
    (here / "nothing" / "x.csv").write_text("a")
    with pytest.raises((ValueError, FileNotFoundError), match=SPEC_ERRORS[spec]) as caught:
        open_data(spec)
    assert "\n" not in str(caught.value)
    assert not list(here.glob("cache/*"))


def test_text_is_read_in_pieces_that_keep_every_character(here, monkeypatch, tokenizer_directory):
    monkeypatch.setattr("oomb_jax.train.data.sources._PIECE", 7)
    monkeypatch.setattr("oomb_jax.train.data.store._BATCH_BYTES", 20)
    rng = random.Random(0)
    texts = ["".join(rng.choices("aé€😀\n", (4, 4, 4, 4, 1), k=rng.randrange(60))) for _ in range(40)]
    (here / "d").mkdir()
    for i, text in enumerate(texts):
        (here / "d" / f"{i:02}.txt").write_bytes(text.encode())
    assert read("d") == [text for text in texts if text]
    tokenizer = load_tokenizer(str(tokenizer_directory))
    got = ids_of(open_data("d", tokenizer=str(tokenizer_directory), heldout=0))
    assert [tokenizer.decode(ids[:-1]) for ids in got] == [text for text in texts if text]


def test_fields_directories_and_other_endings(here, caplog):
    (here / "d" / "sub").mkdir(parents=True)
    (here / "d" / ".hidden").mkdir()
    (here / "d" / ".hidden" / "x.txt").write_text("no")
    (here / "d" / "b.txt").write_text("plain\n")
    (here / "d" / "README.md").write_text("no")
    rows = [{"text": "ä"}, {"text": ""}, {"text": "two\nlines"}]
    (here / "d" / "sub" / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read("d/") == ["plain\n", "ä", "two\nlines"]
    assert "1 files of other endings are left out" in caplog.text
    (here / "f.jsonl").write_text('{"content": "x"}')
    assert read("f.jsonl#content") == ["x"]


def test_a_directory_of_token_files_and_text_is_one_text(here, run):
    (here / "d").mkdir()
    rng = random.Random(1)
    texts = ["".join(rng.choices("abc", k=rng.randrange(1, 50))) for _ in range(30)]
    for i in range(3):
        (here / "part.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[10 * i : 10 * i + 10]))
        if i < 2:
            run("pack", "--data", "part.jsonl", "--out", f"d/{i}.tokens")
    (here / "part.jsonl").rename(here / "d" / "part.jsonl")
    data = open_data("d", heldout=0)
    assert texts_of(data) == texts
    part = data.train.parts[0]
    everywhere = np.random.default_rng(0).permutation(part.tokens)
    whole = np.array([i for text in texts for i in (*text.encode(), END)])
    np.testing.assert_array_equal(part.take(everywhere), whole[everywhere])


def test_tokenizer_file(here, tokenizer_directory):
    from tokenizers import Tokenizer

    text = "the cat sat on the mat, " * 9 + "é€"
    (here / "a.txt").write_text(text)
    data = open_data("a.txt", tokenizer=str(tokenizer_directory), heldout=0)
    plain = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    plain.no_truncation()
    (ids,) = ids_of(data)
    assert ids.tolist() == [*plain.encode(text).ids, 1], "<|endoftext|> ends documents, not the end of a chat turn"
    assert len(ids) < len(text)
    assert data.vocab_size == plain.get_vocab_size()
    assert data.tokenizer == "tiny-bpe"
    assert data.largest_id == max(ids)
    same = load_tokenizer(str(tokenizer_directory / "tokenizer.json"))
    assert same.sha256 == load_tokenizer(str(tokenizer_directory)).sha256 != load_tokenizer("bytes").sha256


def test_tokenizer_mistakes(here, tokenizer_directory):
    (here / "a.txt").write_bytes(b"ok \xff")
    (here / "bad.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tokenizer='gone': no file gone; pass 'bytes'"):
        open_data("a.txt", tokenizer="gone")
    with pytest.raises(ValueError, match=r"tokenizer=bad.json: not a tokenizer.json"):
        open_data("a.txt", tokenizer="bad.json")
    with pytest.raises(ValueError, match=r"a.txt: not UTF-8 text .*use tokenizer 'bytes'"):
        open_data("a.txt", tokenizer=str(tokenizer_directory))
    assert ids_of(open_data("a.txt", heldout=0))[0].tolist() == [*b"ok \xff", END]
    file = tokenizer_directory / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|none|>").replace("<|im_end|>", "<|nothing|>"))
    with pytest.raises(ValueError, match=r"no token to end a document with; name one .* tokenizer_config.json"):
        load_tokenizer(str(file))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line for its standard output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["data", *map(str, arguments)])
        main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def fail(run, capsys):
    """Run the command line for the one line of its error."""

    def fail(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return fail


def test_pack_and_show(here, run, fail, tokenizer_directory):
    (here / "a.txt").write_text("the cat sat")
    run("pack", "--data", "a.txt", "--out", "bytes.tokens")
    shown = run("show", "bytes.tokens")
    assert "tokens      12 (uint16" in shown
    assert "first text  'the cat sat'" in shown
    run("pack", "--data", "a.txt", "--tokenizer", tokenizer_directory, "--out", "bpe.tokens")
    assert "first ids" in run("show", "bpe.tokens")
    assert "first text  'the cat sat'" in run("show", "bpe.tokens", "--tokenizer", tokenizer_directory)
    assert "not the one that bpe.tokens was packed with" in fail("show", "bpe.tokens", "--tokenizer", "bytes")
    assert open_data("bpe.tokens", heldout=0).tokenizer == "tiny-bpe"
    with pytest.raises(ValueError, match=r"bpe.tokens: its tokenizer 'tiny-bpe' differs from the 'bytes' that is"):
        open_data("bpe.tokens", tokenizer="bytes")
    with pytest.raises(ValueError, match=r"bpe.tokens: its tokenizer 'tiny-bpe' differs from the 'bytes' of .*a.txt"):
        open_data("a.txt=1,bpe.tokens=1")
    for arguments, message in (
        (("--data", "a.txt", "--out", "x.bin"), "write x.tokens"),
        (("--data", "a.txt=1,stdlib=1", "--out", "x.tokens"), "several sources"),
        (("--data", "bpe.tokens", "--out", "x.tokens"), "packed already"),
        (("--data", "no.txt", "--out", "x.tokens"), "no such file"),
    ):
        line = fail("pack", *arguments)
        assert line.startswith("error: ")
        assert message in line
    assert not (here / "x.tokens").exists()


def test_the_module_runs(here):
    (here / "a.txt").write_text("text")
    command = [sys.executable, "-m", "oomb_jax.train.data", "pack", "--data", "a.txt", "--out", "a.tokens"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == ""
    assert ended.stderr.startswith("tokenised a.txt: 5 tokens, 1 documents")


def test_a_missing_extra_says_what_to_install(here, monkeypatch):
    for module in ("pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (here / "a.parquet").write_bytes(b"PAR1")
    for spec, package in (("a.parquet", "pyarrow"), ("hf:some/where", "datasets")):
        with pytest.raises(ImportError, match=rf"data='{spec}' needs {package}, .*pip install 'oomb_jax\[hf\]'"):
            open_data(spec)


def test_parquet(here):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i} é" for i in range(700)]
    parquet.write_table(pa.table({"id": list(range(700)), "text": texts}), here / "a.parquet", row_group_size=300)
    assert read("a.parquet") == texts
    with pytest.raises(ValueError, match=r"a.parquet: no field 'body', it has 'id', 'text'"):
        open_data("a.parquet#body")
    parquet.write_table(pa.table({"text": ["a", None]}), here / "null.parquet")
    with pytest.raises(ValueError, match=r"null.parquet row 1: the text is null"):
        open_data("null.parquet")
    (here / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"bad.parquet: not a parquet file"):
        open_data("bad.parquet")


def test_datasets(here, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    texts = [f"row {i} é" for i in range(600)]
    made = datasets.Dataset.from_dict({"text": texts, "id": list(range(600))})
    made.save_to_disk("saved")
    datasets.DatasetDict({"train": made, "test": made.select([5])}).save_to_disk("saved-splits")
    (here / "files").mkdir()
    made.to_json("files/train.jsonl")
    assert read("hf:saved") == read("hf:saved-splits") == read("hf:files") == texts
    assert read("hf:saved-splits:test") == ["row 5 é"]
    assert read("hf:files:train[:2]") == texts[:2]
    made.select([7, 8]).to_json("files/train.jsonl")
    assert read("hf:files") == texts[7:9]
    for spec, message in (
        ("hf:saved:train", "saved without splits; leave out ':train'"),
        ("hf:saved-splits:valid", "no split 'valid'; it has train, test"),
        ("hf:files:valid", "cannot be opened: .*valid"),
        ("hf:saved#body", "no field 'body', it has 'text', 'id'"),
        ("hf:no-such-directory", "cannot be opened"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            open_data(spec)
        assert "\n" not in str(caught.value)
