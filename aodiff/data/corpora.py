"""Two real corpora that come with every Python: English prose and source code.

Their content follows the interpreter's version, so numbers on them compare runs of one version.
"""

import hashlib
import importlib
import sysconfig
import tokenize
from collections.abc import Mapping
from pathlib import Path

from ml_collections import ConfigDict

from aodiff.data.info import DataError
from aodiff.data.packing import pack_in_memory
from aodiff.data.prepared import describe
from aodiff.data.sources import Source
from aodiff.data.tokenizers import make_tokenizer

__all__ = ["CORPORA", "describe", "open_splits"]

HELD_OUT = 0.05  # of the bytes, for validation and again for test
NOT_LIBRARY = frozenset(
    "test tests idlelib lib2to3 pydoc_data turtledemo ensurepip site-packages dist-packages".split()
)


def pydoc_topics() -> dict[str, str]:
    """The language reference behind `help()`, one document per topic."""
    try:
        return dict(importlib.import_module("pydoc_data.topics").topics)
    except ModuleNotFoundError as error:
        raise DataError(
            "this Python lacks pydoc_data.topics; use data.name='markov' or prepare a text."
        ) from error


def python_stdlib() -> dict[str, str]:
    """Every module of the standard library but its tests and demos, by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py"))
    documents = {}
    for path in sorted(files):
        relative = path.relative_to(root)
        if NOT_LIBRARY.isdisjoint(relative.parts):
            with tokenize.open(path) as file:
                documents[relative.as_posix()] = file.read()
    if not documents:
        raise DataError(
            f"{root} holds no .py files (a zipped or frozen library); use data.name='pydoc_topics'."
        )
    return documents


CORPORA = {"pydoc_topics": pydoc_topics, "python_stdlib": python_stdlib}


def split_documents(documents: Mapping[str, str]) -> dict[str, list[str]]:
    """Splits 90/5/5 by bytes, whole documents, in the order of the sha256 of their keys.

    A document larger than half a held-out split always trains: it would be the whole split.
    """
    keys = sorted(documents, key=lambda key: hashlib.sha256(key.encode()).digest())
    quota = HELD_OUT * sum(len(text) for text in documents.values())
    sizes = {"validation": 0, "test": 0}
    splits = {"train": [], "validation": [], "test": []}
    for key in keys:
        text = documents[key]
        open_split = next((name for name, size in sizes.items() if size < quota), "train")
        if open_split != "train" and len(text) <= quota / 2:
            sizes[open_split] += len(text)
            splits[open_split].append(text)
        else:
            splits["train"].append(text)
    return splits


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """The packed documents of the text by split."""
    tokenizer = make_tokenizer(config.tokenizer)
    return {
        split: pack_in_memory(texts, tokenizer, config.seq_len)
        for split, texts in split_documents(CORPORA[config.name]()).items()
    }
