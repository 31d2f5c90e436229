"""Python in whole words: ids for the pieces that most modules of the standard library have."""

import collections
import dataclasses
import functools
import hashlib
import re

import numpy as np

from aodiff.data.info import DataError

# A line break with its indentation, a word or a run of signs, either with the blank before it.
PIECE = re.compile(r"\n *| ?\w+| ?[^\s\w]+|\s")


@dataclasses.dataclass(frozen=True)
class PythonTokenizer:
    """Ids 0 to 255 are bytes, then come the `number` most usual pieces, then eos.

    What is none of these pieces is spelled in bytes. The pieces are those of the training split of
    `data.name="python_stdlib"`, so another version of Python has another fingerprint.
    """

    spec: str
    unit: str = "token"
    lossless: bool = True

    def __post_init__(self):
        if not 1 <= self.number <= 50_000:
            raise DataError(
                f"tokenizer {self.spec!r} needs a number of pieces from 1 to 50000, such as "
                "python:1024."
            )

    @property
    def number(self) -> int:
        _, _, number = self.spec.partition(":")
        return int(number) if number.isdecimal() else 0

    @property
    def vocab_size(self) -> int:
        return 257 + self.number

    @property
    def eos(self) -> int:
        return 256 + self.number

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Those of the most modules first, the shorter and then the smaller first among equals."""
        found = sorted(counts().items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        if len(found) < self.number:
            raise DataError(
                f"the standard library has {len(found)} pieces, less than the {self.number} of "
                f"tokenizer {self.spec!r}; ask for fewer."
            )
        return tuple(piece for piece, _ in found[: self.number])

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256("\0".join(self.pieces).encode()).hexdigest()

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: 256 + i for i, piece in enumerate(self.pieces)}

    @functools.cached_property
    def _bytes(self) -> list[bytes]:
        single = [bytes([i]) for i in range(256)]
        return [*single, *(piece.encode() for piece in self.pieces), b""]

    def encode(self, text: str) -> np.ndarray:
        ids = []
        for piece in PIECE.findall(text):
            known = self._ids.get(piece)
            ids += piece.encode() if known is None else [known]
        return np.array(ids, np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        found = b"".join(self._bytes[i] for i in np.asarray(ids).tolist())
        return found.decode("utf-8", "replace")


@functools.cache
def counts() -> dict[str, int]:
    """In how many training modules of the standard library there is each piece of two letters."""
    from aodiff.data.corpora import python_stdlib, split_documents  # which knows all tokenizers

    texts = split_documents(python_stdlib())["train"]
    found = collections.Counter(piece for text in texts for piece in set(PIECE.findall(text)))
    return {piece: number for piece, number in found.items() if len(piece.encode()) > 1}
