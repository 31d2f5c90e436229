"""Published token counts on real files, looked up in $AODIFF_TEST_DATA, else in shared/data."""

import importlib.util
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import open_splits, prepare
from aodiff.data.tokenizers import make_tokenizer

ROOT = Path(__file__).parents[2]


def fixture(name: str) -> Path:
    """Path of a shared file; skips the test with its name when it is absent."""
    folders = [ROOT / "shared" / "data", ROOT.parent / "shared" / "data"]
    if os.environ.get("AODIFF_TEST_DATA"):
        folders = [Path(os.environ["AODIFF_TEST_DATA"])]
    found = [folder / name for folder in folders if (folder / name).exists()]
    if not found:
        pytest.skip(f"no {name} in $AODIFF_TEST_DATA or shared/data")
    return found[0]


def read(name: str) -> str:
    return fixture(name).read_bytes().decode()


@pytest.fixture(scope="module")
def gpt2():
    pytest.importorskip("tiktoken")
    return make_tokenizer(f"gpt2:{fixture('tokenizers/gpt2')}")


def test_tiny_shakespeare(gpt2):
    text = read("text/tinyshakespeare/input.txt")
    cut = int(0.9 * len(text))
    assert len(gpt2.encode(text)) == 338_025
    assert [len(gpt2.encode(part)) for part in (text[:cut], text[cut:])] == [301_966, 36_059]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("novels/frankenstein", 92_970),
        ("novels/sherlock_holmes", 152_341),
        ("wikitext-2/valid", 258_659),
        ("wikitext-2/test", 295_877),
    ],
)
def test_gpt2_counts(gpt2, name, count):
    text = read(f"text/{name}.txt")
    ids = gpt2.encode(text)
    assert len(ids) == count and gpt2.decode(ids) == text


def test_lambada_rows(gpt2):
    rows = read("text/lambada/lambada_test.jsonl").splitlines()
    lengths = [len(gpt2.encode(json.loads(row)["text"])) for row in rows]
    assert (len(lengths), sum(lengths), max(lengths)) == (5_153, 430_230, 224)


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")
def test_tiktoken_equals_tokenizers(gpt2):
    from tokenizers import ByteLevelBPETokenizer

    folder = fixture("tokenizers/gpt2")
    other = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    text = read("text/novels/frankenstein.txt")[:100_000]
    assert other.encode(text).ids == gpt2.encode(text).tolist()


@pytest.mark.parametrize(
    ("package", "spec", "counts"),
    [
        ("tokenizers", "hf:tokenizers/bpe_novels_4k/tokenizer.json", (110_812, 168_346)),
        (
            "sentencepiece",
            "sp:tokenizers/sentencepiece_cc_32k/"
            "sentencepiece_cc_all.32000.100extra-sentencepiece.model",
            (102_315, 145_311),
        ),
    ],
)
def test_other_tokenizers(package, spec, counts):
    pytest.importorskip(package)
    kind, name = spec.split(":")
    tokenizer = make_tokenizer(f"{kind}:{fixture(name)}")
    texts = [read(f"text/novels/{n}.txt") for n in ("frankenstein", "sherlock_holmes")]
    assert tuple(len(tokenizer.encode(text)) for text in texts) == counts
    ids = tokenizer.encode(texts[0][:5000])
    assert re.sub(r"\s", "", tokenizer.decode(ids)) == re.sub(r"\s", "", texts[0][:5000])
    assert ids.max() < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tinyshakespeare/input", 1_059_742),
        ("novels/frankenstein", 408_360),
        ("wikitext-2/test", 1_143_679),
    ],
)
def test_char27_counts(name, count):
    assert len(make_tokenizer("char27").encode(read(f"text/{name}.txt"))) == count


def test_lambada_through_prepare(gpt2, tmp_path):
    """One eos per row, every token kept, in the order of the file."""
    source = f"test={fixture('text/lambada/lambada_test.jsonl')}"
    args = ["--name=lambada", "--length=256", f"--dir={tmp_path}", "--source", source]
    prepare.run([*args, f"--tokenizer={gpt2.spec}", "--packing=pad"])
    c = base().data
    c.name, c.dir, c.seq_len, c.tokenizer = "lambada", str(tmp_path), 256, gpt2.spec
    test = open_splits(c)["test"]
    rows = test.read(np.arange(len(test)))
    assert len(test) == 5_153 and rows["length"].sum() == 430_230 + 5_153
    first = json.loads(read("text/lambada/lambada_test.jsonl").split("\n")[0])["text"]
    assert gpt2.decode(rows["tokens"][0]) == first
