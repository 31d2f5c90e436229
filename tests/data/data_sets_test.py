"""Every data set that needs no preparation, through `describe` and `open_splits`."""

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DATA_SETS, DataError, codecs, corpora, describe, open_splits

LENGTHS = {"digits": 64, "breast_cancer": 31, "wine": 14}


def config(name: str, **values):
    c = base().data
    c.name, c.seq_len = name, LENGTHS.get(name, 64)
    c.update(values)
    return c


@pytest.mark.parametrize("name", DATA_SETS)
def test_rows_fit_their_description(name):
    c = config(name)
    info, splits = describe(c), open_splits(c)
    assert set(splits) == {"train", "validation", "test"}
    for source in splits.values():
        tokens = source.read(np.arange(min(64, len(source))))["tokens"]
        assert tokens.shape[1] == info.seq_len == c.seq_len
        assert tokens.max() < info.vocab_size
        if info.unit_sizes:
            assert (tokens < np.array(info.unit_sizes)).all()
        assert source.stats.rows == len(source) and len(source.fingerprint) == 64
    assert len({source.fingerprint for source in splits.values()}) == 3
    again = open_splits(c)
    assert all(again[split].fingerprint == splits[split].fingerprint for split in splits)


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "chain"])
def test_hidden_permutation(name):
    plain, hidden = config(name), config(name, permute_seed=3)
    info = describe(hidden)
    assert sorted(info.permutation) == list(range(info.seq_len))
    rows = np.arange(10)
    natural = open_splits(plain)["test"].read(rows)["tokens"]
    shown = open_splits(hidden)["test"].read(rows)["tokens"]
    assert not np.array_equal(shown, natural)
    np.testing.assert_array_equal(info.natural(shown), natural)
    for unit, position in enumerate(info.permutation):
        np.testing.assert_array_equal(shown[:, unit], natural[:, position])
    if info.unit_sizes:
        assert (shown < np.array(info.unit_sizes)).all()
    first, second = (open_splits(c)["test"].fingerprint for c in (plain, hidden))
    assert first != second


def test_digits_are_the_images_of_scikit_learn():
    from sklearn.datasets import load_digits

    c = config("digits", levels=17)
    info, splits = describe(c), open_splits(c)
    rows = np.concatenate([s.read(np.arange(len(s)))["tokens"] for s in splits.values()])
    assert info.grid == (8, 8) and info.vocab_size == 17
    images = load_digits().data
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, images.astype(int).tolist()))
    assert np.array_equal(info.codec.decode(rows), rows)


def test_levels_are_equal_steps():
    codec = codecs.Levels(4, 16)
    ids, _ = codec.encode(np.arange(17.0))
    assert ids.tolist() == [0] * 5 + [1] * 4 + [2] * 4 + [3] * 4


def test_table_splits_share_no_row_and_codes_are_balanced():
    c = config("breast_cancer")
    _, splits = codecs._load("breast_cancer", 8)
    seen = [set(map(tuple, part.tolist())) for part in splits.values()]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
    assert sum(map(len, splits.values())) == 569
    train = open_splits(c)["train"]
    counts = np.bincount(train.read(np.arange(len(train)))["tokens"][:, 0], minlength=8)
    assert counts.min() > 0.8 * len(train) / 8


def test_column_codec_round_trips():
    table = np.array([[0.0, 1.5], [2.0, np.nan], [2.0, 9.0], [0.0, 4.0], [0.0, 5.0], [2.0, 7.0]])
    columns = tuple(codecs.fit_column(column, 3) for column in table.T)
    codec = codecs.Columns(("label", "value"), columns)
    ids, present = codec.encode(table)
    assert present.sum() == 11 and not present[1, 1]
    np.testing.assert_array_equal(codec.decode(ids)[:, 0], table[:, 0])
    for i in range(3):
        inside = table[present[:, 1] & (ids[:, 1] == i), 1]
        assert codec.decode(np.array([[0, i]]))[0, 1] == np.median(inside)
    unseen, _ = codec.encode(np.array([[1.0, 100.0]]))
    assert unseen.tolist() == [[2, 2]]  # "other", and the last bin
    assert codec.sizes == (3, 3)
    np.testing.assert_allclose(columns[1].log_widths, np.log(np.diff(columns[1].edges)))


def test_wrong_length_for_a_table():
    with pytest.raises(
        DataError, match="64 units per row, data.seq_len is 32; set data.seq_len=64"
    ):
        describe(config("digits", seq_len=32))
    with pytest.raises(DataError, match="data.levels is 1"):
        describe(config("digits", levels=1))


def test_corpus_conserves_its_bytes():
    """Rows of a split are its documents, eos after each, up to the last partial row."""
    topics = corpora.pydoc_topics()
    splits = corpora.split_documents(topics)
    assert sorted(sum(splits.values(), [])) == sorted(topics.values())
    source = open_splits(config("pydoc_topics"))["test"]
    stream = source.read(np.arange(len(source)))["tokens"].reshape(-1)
    whole = b"\0".join(text.encode() for text in splits["test"]) + b"\0"
    shown = bytes(np.where(stream == 256, 0, stream).astype(np.uint8))
    assert whole.startswith(shown) and len(whole) - len(shown) < 64
    assert source.stats.bytes == (stream != 256).sum()


def test_held_out_documents_have_a_sensible_size():
    for name in corpora.CORPORA:
        sizes = {
            split: sum(map(len, texts))
            for split, texts in corpora.split_documents(corpora.CORPORA[name]()).items()
        }
        total = sum(sizes.values())
        assert all(0.04 < sizes[split] / total < 0.09 for split in ("validation", "test")), sizes


def test_text_of_a_row():
    info = describe(config("pydoc_topics", permute_seed=1, seq_len=4))
    shown = np.frombuffer(b"abcd", np.uint8)[list(info.permutation)]
    assert info.text(shown) == "abcd"
    assert describe(config("chain")).text(np.array([3, 1])) == "3 1"


def test_a_row_of_a_table_reads_as_names_and_values():
    c = base().data
    c.name, c.seq_len, c.permute_seed = "wine", 14, 3
    info, source = describe(c), open_splits(c)["validation"]
    text = info.text(source.read(np.arange(1))["tokens"][0])
    values = info.codec.decode(info.natural(source.read(np.arange(1))["tokens"]))[0]
    assert text.startswith(f"alcohol {values[0]:g}, ") and text.endswith(f"label {values[-1]:g}")
