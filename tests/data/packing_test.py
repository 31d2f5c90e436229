"""Packing conserves tokens: in = out + dropped, whatever the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aodiff.data.info import DataError
from aodiff.data.packing import Concat, Pad, pack_in_memory
from aodiff.data.tokenizers import make_tokenizer

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=12)
LENGTH, PAD = 5, 10


def arrays(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.array(x, np.uint16) for x in lists]


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_concat(documents):
    packer = Concat(LENGTH)
    rows = [packer.add(ids)["tokens"] for ids in arrays(documents)]
    out = np.concatenate([r.reshape(-1) for r in rows] + [packer.rest()])
    assert out.tolist() == sum(documents, [])
    assert len(packer.rest()) == packer.dropped_tokens < LENGTH


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.sampled_from(["drop", "truncate", "split"]))
def test_pad(documents, too_long):
    packer = Pad(LENGTH, PAD, too_long)
    rows = [packer.add(ids) for ids in arrays(documents)]
    kept = []
    for row in rows:
        for tokens, n in zip(row["tokens"], row["length"], strict=True):
            assert (tokens[n:] == PAD).all() and (tokens[:n] != PAD).all()
            kept.append(tokens[:n].tolist())
    assert sum(map(len, documents)) == sum(map(len, kept)) + packer.dropped_tokens
    expected = {
        "drop": [d for d in documents if len(d) <= LENGTH],
        "truncate": [d if len(d) <= LENGTH else d[: LENGTH - 1] + d[-1:] for d in documents],
        "split": [d[i : i + LENGTH] for d in documents for i in range(0, len(d), LENGTH)],
    }[too_long]
    assert kept == expected
    dropped = sum(len(d) > LENGTH for d in documents) if too_long == "drop" else 0
    assert packer.dropped_documents == dropped


def test_pad_can_refuse():
    with pytest.raises(DataError, match="has 6 tokens, rows have 5"):
        Pad(LENGTH, PAD, "error").add(np.arange(6))


def test_in_memory():
    source = pack_in_memory(["abc", "de"], make_tokenizer("byte"), 3)
    assert source.read(np.arange(2))["tokens"].tolist() == [[97, 98, 99], [256, 100, 101]]
    assert (source.stats.rows, source.stats.tokens, source.stats.bytes) == (2, 6, 5)
    with pytest.raises(DataError, match="lower data.seq_len"):
        pack_in_memory(["abc"], make_tokenizer("byte"), 30)
