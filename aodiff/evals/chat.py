"""Chat templates of pretrained masked diffusion models, as plain functions, and where answers end.

The tokenizer is a file the user has; ids of special tokens are facts of the checkpoints and stand
here. Source: mdm.md sections 4, 5 and 9.1.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from aodiff.data.tokenizers import Tokenizer

Messages = Sequence[tuple[str, str]]  # (role, content); the last is the user's
DREAM_SYSTEM = "You are a helpful assistant."


def _llada(messages: Messages) -> str:
    turns = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>"
        for role, content in messages
    )
    return f"<|startoftext|>{turns}<|start_header_id|>assistant<|end_header_id|>\n\n"


def _chatml(messages: Messages) -> str:
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{turns}<|im_start|>assistant\n"


def _dream(messages: Messages) -> str:
    system = () if messages[0][0] == "system" else (("system", DREAM_SYSTEM),)
    return _chatml((*system, *messages))


@dataclasses.dataclass(frozen=True)
class Template:
    """How one family of models is asked.

    Attributes:
      render: messages -> text, up to where the answer begins.
      special: what must become one id, and that id.
      ends: those of `special` that end an answer; what follows the first of them is filling.
    """

    render: Callable[[Messages], str]
    special: Mapping[str, int]
    ends: tuple[str, ...]


CHATML = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
TEMPLATES = {
    "llada": Template(
        _llada,
        {
            "<|startoftext|>": 126080,
            "<|endoftext|>": 126081,
            "<|start_header_id|>": 126346,
            "<|end_header_id|>": 126347,
            "<|eot_id|>": 126348,
        },
        ("<|eot_id|>", "<|endoftext|>"),
    ),
    "dream": Template(_dream, CHATML, ("<|im_end|>", "<|endoftext|>")),
    # Thinking is switched off by a block of it that is empty.
    "qwen3": Template(
        lambda messages: _chatml(messages) + "<think>\n\n</think>\n\n",
        CHATML | {"<think>": 151667, "</think>": 151668},
        ("<|im_end|>", "<|endoftext|>"),
    ),
}


def render(name: str, messages: Messages, begun: str = "") -> str:
    """The text a model continues: messages in its template, then what its answer begins with.

    Raises:
      ValueError: an unknown template, or a message that holds one of its special tokens.
    """
    if name not in TEMPLATES:
        raise ValueError(f"Template {name!r} is unknown; use one of {', '.join(TEMPLATES)}.")
    template = TEMPLATES[name]
    for role, content in messages:
        for token in template.special:
            if token in content:
                raise ValueError(
                    f"A message of the {role} holds {token}, a special token of {name}; remove it."
                )
    return template.render(messages) + begun


def encode(name: str | None, text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Ids (n,) int32 of a rendered text: special tokens by the table, the rest by the tokenizer.

    Without a template there is nothing special in it.
    """
    if name is None:
        return np.asarray(tokenizer.encode(text), np.int32)
    special = TEMPLATES[name].special
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    ids = [[special[p]] if p in special else tokenizer.encode(p) for p in parts if p]
    return np.concatenate([np.asarray(part, np.int32) for part in ids])


def answer(name: str, text: str) -> str:
    """The part of a generated text before its first end token."""
    ends = "|".join(map(re.escape, TEMPLATES[name].ends))
    return re.split(ends, text, maxsplit=1)[0]


def answer_ids(name: str, ids: np.ndarray) -> np.ndarray:
    """The part of generated ids (n,) before the first end token."""
    template = TEMPLATES[name]
    is_end = np.isin(ids, [template.special[token] for token in template.ends])
    return ids[: int(np.argmax(is_end))] if is_end.any() else ids
