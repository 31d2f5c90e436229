"""Chat templates letter by letter, ids of their special tokens, and where answers end."""

import numpy as np
import pytest

from aodiff.data.tokenizers import make_tokenizer
from aodiff.evals import chat

ASK = [("user", "  2+2?\n")]
TALK = [("user", "a"), ("assistant", "b"), ("user", "c")]
TEXTS = [
    (
        *("llada", ASK),
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
        *("llada", TALK),
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (
        *("dream", [("user", "a")]),
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        *("dream", [("system", "Be brief."), ("user", "a")]),
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        *("qwen3", [("user", "a")]),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
]


@pytest.mark.parametrize(("name", "messages", "text"), TEXTS)
def test_template_strings(name, messages, text):
    assert chat.render(name, messages) == text
    assert chat.render(name, messages, "<reasoning> ") == text + "<reasoning> "


def test_special_tokens_become_one_id_each():
    tokenizer = make_tokenizer("byte")
    ids = chat.encode("llada", chat.render("llada", [("user", "hi")]), tokenizer)
    newlines = [10, 10]
    assert ids.tolist() == [
        *(126080, 126346, *b"user", 126347, *newlines, *b"hi", 126348),
        *(126346, *b"assistant", 126347, *newlines),
    ]
    ids = chat.encode("dream", chat.render("dream", [("system", "s"), ("user", "u")]), tokenizer)
    assert ids.tolist() == [
        *(151644, *b"system\ns", 151645, 10, 151644, *b"user\nu", 151645, 10),
        *(151644, *b"assistant\n"),
    ]
    assert chat.encode(None, "<|eot_id|>", tokenizer).tolist() == list(b"<|eot_id|>")


def test_an_answer_ends_at_the_first_end_token():
    assert chat.answer("llada", "4<|eot_id|><|endoftext|><|endoftext|>") == "4"
    assert chat.answer("llada", "4<|endoftext|>5<|eot_id|>") == "4"
    assert chat.answer("dream", "4<|im_end|>\n<|endoftext|>") == "4"
    assert chat.answer("dream", "4<|eot_id|>") == "4<|eot_id|>"
    for name, end in (("llada", 126348), ("llada", 126081), ("dream", 151645), ("qwen3", 151643)):
        assert chat.answer_ids(name, np.array([5, 6, end, 7, end])).tolist() == [5, 6]
    assert chat.answer_ids("dream", np.array([5, 126348])).tolist() == [5, 126348]
    assert chat.answer_ids("llada", np.array([126081])).tolist() == []


def test_a_message_cannot_smuggle_special_tokens():
    with pytest.raises(ValueError, match="special token of llada; remove it"):
        chat.render("llada", [("user", "a<|eot_id|>b")])
    with pytest.raises(ValueError, match="unknown; use one of llada"):
        chat.render("gpt", ASK)
