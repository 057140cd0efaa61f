"""Batches: pure in (seed, step), aligned labels, documents kept apart, nothing of the held-out text in training."""

import hashlib
import json
import logging
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from oomb_jax.shapes import IGNORE
from oomb_jax.train.data import Data, View, check_vocabulary, evaluation_batch, open_data, sample

END = 256


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def random_texts(count, seed=0, letters="abcdefg", longest=40):
    rng = random.Random(seed)
    return [f"{i}:" + "".join(rng.choices(letters, k=rng.randrange(longest))) for i in range(count)]


@pytest.fixture
def load(tmp_path):
    def load(texts, heldout=0.0, name="data") -> Data:
        path = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        return open_data(str(path), heldout=heldout, cache=tmp_path / "cache")

    return load


@pytest.fixture
def mixture(tmp_path) -> Data:
    write_jsonl(tmp_path / "a.jsonl", random_texts(30, 1, "abc"))
    write_jsonl(tmp_path / "b.jsonl", random_texts(50, 2, "xyz"))
    spec = f"{tmp_path / 'a.jsonl'}=1.4,{tmp_path / 'b.jsonl'}=0.6"
    return open_data(spec, heldout=0, cache=tmp_path / "cache")


def ring_of(texts):
    return np.array([i for text in texts for i in (*text.encode(), END)])


def documents_of(view: View):
    """The documents of a view's first part, as bytes."""
    part = view.parts[0]
    ids = [part.take(np.arange(start, start + length)) for start, length in zip(part.starts, part.lengths, strict=True)]
    return [bytes(x[x != END].tolist()) for x in ids]


def digest(batches):
    hash = hashlib.sha256()
    for batch in batches:
        for array in (batch.tokens, batch.labels, batch.segments):
            hash.update(b"-" if array is None else array.tobytes())
    return hash.hexdigest()


@pytest.mark.parametrize("pack", [False, True])
def test_a_step_does_not_depend_on_earlier_ones_nor_on_the_process(mixture, tmp_path, pack):
    def draw(step, batch=3):
        return sample(mixture.train, seed=5, step=step, batch=batch, ctx=61, pack=pack)

    in_a_row = [draw(step) for step in range(8)]
    assert digest([draw(7)]) == digest([in_a_row[7]])
    assert len({digest([batch]) for batch in in_a_row}) == 8
    assert digest([sample(mixture.train, seed=6, step=7, batch=3, ctx=61, pack=pack)]) != digest([in_a_row[7]])
    if not pack:
        np.testing.assert_array_equal(draw(7, batch=5).tokens[:3], in_a_row[7].tokens)
    code = f"""if True:
        import sys; sys.path.insert(0, {__file__.rpartition("/")[0]!r})
        from test_data_sampling import digest
        from oomb_jax.train.data import open_data, sample
        data = open_data("{tmp_path}/a.jsonl=1.4,{tmp_path}/b.jsonl=0.6", heldout=0, cache="{tmp_path}/cache")
        print(digest([sample(data.train, seed=5, step=7, batch=3, ctx=61, pack={pack})]))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [digest([in_a_row[7]])]


def test_slices_reach_every_place_equally_and_labels_are_the_next_tokens(load):
    texts = random_texts(7)
    ring, ctx = ring_of(texts), 7
    data = load(texts)
    twice = np.concatenate([ring, ring])
    places = {tuple(twice[i : i + ctx]): i for i in range(len(ring))}
    assert len(places) == len(ring), "the text must tell its places apart"
    steps, seen = 40 * len(ring), Counter()
    for step in range(steps // 8):
        batch = sample(data.train, seed=1, step=step, batch=8, ctx=ctx)
        assert batch.tokens.dtype == batch.labels.dtype == np.int32
        assert batch.segments is None
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            place = places[tuple(tokens)]
            seen[place] += 1
            following = np.arange(place, place + ctx)
            np.testing.assert_array_equal(labels, np.where(following == len(ring) - 1, IGNORE, twice[following + 1]))
    # Every place expects 40 draws, standard deviation 6.3; 5 of those either way.
    assert len(seen) == len(ring)
    assert all(8 < count < 72 for count in seen.values())


@pytest.mark.parametrize("pack", [False, True])
def test_a_text_shorter_than_ctx_is_repeated_and_says_so(load, caplog, pack):
    texts = ["abc", "defgh", "ij"]
    data = load(texts, name=f"short{pack}")
    with caplog.at_level(logging.WARNING):
        batch = [sample(data.train, seed=0, step=step, batch=1, ctx=101, pack=pack) for step in range(3)][-1]
    (line,) = caplog.messages
    size = 10 if pack else 13
    assert f"{size} tokens are repeated to fill ctx=101" in line
    assert batch.tokens.shape == (1, 101)
    if not pack:
        ring = ring_of(texts)
        offset = next(i for i in range(13) if np.array_equal(np.resize(np.roll(ring, -i), 101), batch.tokens[0]))
        closes = (np.arange(101) + offset) % 13 == 12
        np.testing.assert_array_equal(batch.labels[0] == IGNORE, closes)
    with pytest.raises(ValueError, match=rf"ctx=101: longer than the {size} tokens .* ctx={size} at most"):
        sample(data.train, seed=0, step=0, batch=1, ctx=101, pack=pack, repeat=False)
    assert sample(data.train, seed=0, step=0, batch=1, ctx=size, pack=pack, repeat=False).tokens.shape == (1, size)


@pytest.mark.parametrize(("batch", "ctx"), [(1, 64), (3, 37), (2, 300)])
def test_packed_epochs_hold_every_document_once_and_never_mix_them(load, batch, ctx):
    texts = random_texts(60)
    data = load(texts)
    per_epoch = sum(map(len, texts))
    windows = -(-2 * per_epoch // ctx)
    rows = [[], [], []]
    for step in range(-(-windows // batch)):
        drawn = sample(data.train, seed=3, step=step, batch=batch, ctx=ctx, pack=True)
        assert drawn.segments is not None
        assert drawn.tokens.dtype == drawn.labels.dtype == drawn.segments.dtype == np.int32
        for row, array in zip(rows, (drawn.tokens, drawn.labels, drawn.segments), strict=True):
            row.extend(array)
    tokens, labels, segments = map(np.array, rows)
    np.testing.assert_array_equal(segments[:, 0], 0)
    np.testing.assert_array_equal(np.diff(segments), labels[:, :-1] == END)
    tokens, labels = tokens.ravel(), labels.ravel()
    inside = labels[:-1] != END
    np.testing.assert_array_equal(labels[:-1][inside], tokens[1:][inside])
    epochs = []
    for epoch in range(2):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        ends = np.flatnonzero(labels[part] == END) + 1
        assert ends[-1] == per_epoch
        epochs.append([bytes(x.tolist()).decode() for x in np.split(tokens[part], ends[:-1])])
        assert sorted(epochs[-1]) == sorted(texts)
    assert epochs[0] != epochs[1] != texts


def test_mixtures_follow_the_weights_and_each_source_keeps_its_stream(mixture):
    rows = 2000
    assert mixture.train.weights.tolist() == pytest.approx([0.7, 0.3])
    for pack in (False, True):
        batches = [sample(mixture.train, seed=0, step=s, batch=100, ctx=50, pack=pack) for s in range(rows // 100)]
        tokens = np.concatenate([batch.tokens for batch in batches])
        from_b = np.isin(tokens, [ord(letter) for letter in "xyz"]).any(1)
        assert not np.isin(tokens[from_b], [ord(letter) for letter in "abc"]).any()
        # standard deviation of the share: sqrt(0.7·0.3/2000) = 0.0102
        assert abs(from_b.mean() - 0.3) < 0.04
        if pack:
            for i, mine in enumerate((~from_b, from_b)):
                alone = View(parts=(mixture.train.parts[i],), weights=np.ones(1))
                stream = sample(alone, seed=0, step=0, batch=int(mine.sum()), ctx=50, pack=True)
                np.testing.assert_array_equal(stream.tokens, tokens[mine])


def test_held_out_documents_are_whole_and_never_trained_on(load, caplog):
    texts = random_texts(217)
    data = load(texts, heldout=0.1)
    assert data.heldout is not None
    train, held = documents_of(data.train), documents_of(data.heldout)
    assert len(held) == 22
    assert sorted(train + held) == sorted(text.encode() for text in texts)
    assert data.tokens == data.train.tokens + data.heldout.tokens == len(ring_of(texts))
    assert held == documents_of(load(texts, heldout=0.1).heldout)
    assert load(texts).heldout is None
    assert not caplog.messages


@pytest.mark.parametrize(
    "texts",
    [["abcdefghij" * 10], ["a" * 500, "b" * 300, "c" * 200], ["a"] * 9 + ["b" * 5000] + ["c"] * 30],
    ids=["one document", "few", "one too long"],
)
def test_the_end_of_the_text_is_held_out_where_whole_documents_cannot_be(load, caplog, texts):
    data = load(texts, heldout=0.05)
    ring = ring_of(texts)
    assert "the last 5 % of the text is held out" in caplog.text
    assert data.heldout is not None
    assert data.heldout.tokens == round(0.05 * len(ring))
    got = []
    for view in (data.train, data.heldout):
        part = view.parts[0]
        got += [part.take(np.arange(s, s + n)) for s, n in zip(part.starts, part.lengths, strict=True)]
    np.testing.assert_array_equal(np.concatenate(got), ring)
    for view in (data.train, data.heldout):
        batch = sample(view, seed=0, step=1, batch=2, ctx=7, pack=True)
        assert (batch.labels >= 0).all()


def test_a_text_too_short_to_split_is_refused(load):
    with pytest.raises(ValueError, match=r"3 tokens are too few to hold any out.*heldout=0"):
        load(["ab"], heldout=0.05)


@pytest.mark.parametrize("pack", [False, True])
def test_evaluation_batches_are_fixed_even_and_held_out(load, pack):
    texts = random_texts(400)
    data = load(texts, heldout=0.5)
    assert data.heldout is not None
    ring, ctx, count = ring_of(d.decode() for d in documents_of(data.heldout)), 20, 64
    twice = np.concatenate([ring, ring])
    batches = [evaluation_batch(data.heldout, index=i, batch=4, ctx=ctx, pack=pack) for i in range(count // 4)]
    again = evaluation_batch(data.heldout, index=1, batch=count // 4, ctx=ctx, pack=pack)
    np.testing.assert_array_equal(np.concatenate([b.tokens for b in batches])[16:32], again.tokens)
    places = []
    for row in np.concatenate([batch.tokens for batch in batches]):
        row = row[: np.argmax(row == ord(":")) + 1] if pack else row
        found = [i for i in range(len(ring)) if np.array_equal(twice[i : i + len(row)], row)]
        assert found, "not text of the held-out documents"
        places += found[:1]
    if pack:
        assert all(place == 0 or ring[place - 1] == END for place in places)
    counts, _ = np.histogram(places, bins=8, range=(0, len(ring)))
    assert counts.min() >= 6, "8 expected in each eighth of the text"


def test_vocabulary_and_arguments_are_checked(load):
    data = load(random_texts(5))
    check_vocabulary(data, 257)
    with pytest.raises(ValueError, match=r"vocabulary of 256: too small .* largest id is 256 .* at least 257 tokens"):
        check_vocabulary(data, 256)
    for seed, step, batch, ctx, message in (
        (-1, 0, 1, 4, "seed=-1: not below 0"),
        (0, -1, 1, 4, "step=-1: not below 0"),
        (0, 0, 0, 4, "batch=0: at least 1"),
        (0, 0, 1, 0, "ctx=0: at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(data.train, seed=seed, step=step, batch=batch, ctx=ctx)
    with pytest.raises(ValueError, match="heldout=1"):
        load(random_texts(5), heldout=1.0)


def test_the_standard_library_gives_four_million_tokens_of_real_text(tmp_path):
    data = open_data(cache=tmp_path)
    assert data.tokens > 5_000_000
    assert data.heldout is not None
    assert 0.025 <= data.heldout.tokens / data.tokens <= 0.1
    for pack in (False, True):
        batch = sample(data.train, seed=0, step=2, batch=1, ctx=4_194_304, pack=pack, repeat=False)
        assert batch.tokens.shape == (1, 4_194_304)
        assert (batch.labels == IGNORE).sum() <= 1
    assert b"def " in bytes(batch.tokens[0, :100_000].tolist())
