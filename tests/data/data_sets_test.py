"""Every data set that needs no preparation, through `describe` and `open_splits`."""

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DATA_SETS, FROM_FILES, DataError, corpora, describe, open_splits

LENGTHS = {"digits": 64, "breast_cancer": 31, "wine": 14, "diabetes": 11, "iris": 5}
LENGTHS |= {"skeleton": 17, "chain_pose": 15, "sudoku4": 16, "sudoku": 81}


def config(name: str, **values):
    c = base().data
    c.name, c.seq_len = name, LENGTHS.get(name, 64)
    if "maze" in name:
        c.clues, c.maze = (2, 2), (5, 0.5)
    c.update(values)
    return c


@pytest.mark.parametrize("name", [name for name in DATA_SETS if name not in FROM_FILES])
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
