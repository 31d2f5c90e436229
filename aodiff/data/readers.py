"""Local text to documents: .txt and .jsonl, plain or gzipped, as files, folders and globs."""

import dataclasses
import glob
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from aodiff.data.info import DataError

SPLITS = ("train", "validation", "test")
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
END_OF_TEXT = "<|endoftext|>"
# How one .txt file is cut into documents.
LAYOUTS = {
    "file": lambda text: [text],
    "line": lambda text: text.splitlines(keepends=True),
    "blank": lambda text: [part for part in re.split(r"\n\s*\n", text) if part.strip()],
    "endoftext": lambda text: [part for part in text.split(END_OF_TEXT) if part.strip()],
}


@dataclasses.dataclass(frozen=True)
class Input:
    """One file; `key` is its path below the source it was found in, `split` is None when its
    documents are to be divided among the splits."""

    path: Path
    key: str
    split: str | None

    def describe(self) -> dict[str, str | int | None]:
        """Name, size and hash for data.json, without the folder it happened to be in."""
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = self.path.stat().st_size
        return {"name": self.key, "split": self.split, "bytes": size, "sha256": digest}


def _expand(pattern: str) -> list[tuple[Path, str]]:
    root = Path(pattern).expanduser()
    if root.is_file():
        return [(root, root.name)]
    if root.is_dir():
        found = [path for path in root.rglob("*") if path.is_file()]
    else:
        found = [Path(path) for path in glob.glob(str(root), recursive=True)]
        root = Path(*root.parts[: next(i for i, p in enumerate((*root.parts, "*")) if "*" in p)])
    # A key uses forward slashes everywhere, so that splits do not depend on the platform.
    keyed = [(p, p.relative_to(root).as_posix() if root in p.parents else p.name) for p in found]
    return sorted((pair for pair in keyed if pair[1].endswith(SUFFIXES)), key=lambda pair: pair[1])


def list_inputs(sources: Sequence[str]) -> list[Input]:
    """Files of sources such as "corpus/", "books/*.txt" or "validation=held_out.jsonl.gz"."""
    inputs = []
    for source in sources:
        split, _, pattern = source.rpartition("=")
        if split not in ("", *SPLITS):
            raise DataError(f"source {source!r} names split {split!r}; use one of {SPLITS}.")
        found = _expand(pattern)
        if not found:
            raise DataError(f"source {pattern!r} has no files ending in {', '.join(SUFFIXES)}.")
        inputs.extend(Input(path, key, split or None) for path, key in found)
    return inputs


def _check(text: str, where: str, errors: str) -> str:
    """Refuses NUL and lone carriage returns, or replaces them."""
    if errors == "replace":
        return re.sub("\r(?!\n)", "\n", text.replace("\0", "\ufffd"))
    match = re.search("\0|\r(?!\n)", text)
    if match:
        offset = len(text[: match.start()].encode())
        raise DataError(
            f"{where} has {match.group()!r} at byte {offset} of its text; clean it or pass "
            "--errors=replace."
        )
    return text


def _decode(data: bytes, where: str, errors: str) -> str:
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 at byte {error.start}; convert it or pass --errors=replace."
        ) from error


def documents(item: Input, layout: str, field: str, errors: str) -> Iterator[tuple[str, str]]:
    """Yields (key, text) of each document of one file.

    Args:
      item: the file.
      layout: how a .txt file is cut, a name of LAYOUTS; jsonl has one document per line.
      field: the field of a jsonl record that holds the text.
      errors: "strict" or "replace", for bytes that are not text.
    """
    opener = gzip.open if item.path.suffix == ".gz" else open
    with opener(item.path, "rb") as file:
        if ".jsonl" not in item.path.suffixes:
            text = _decode(file.read(), str(item.path), errors)
            parts = LAYOUTS[layout](_check(text, str(item.path), errors))
            for i, part in enumerate(parts):
                yield (item.key if layout == "file" else f"{item.key}:{i}"), part
            return
        for i, line in enumerate(file):
            where = f"{item.path} line {i + 1}"
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line, where, errors))
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is not JSON ({error}).") from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                fields = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise DataError(
                    f"{where} has no text field {field!r}, it has {fields}; use --field."
                )
            yield f"{item.key}:{i}", _check(record[field], where, errors)


def split_of(key: str, held_out: int) -> str:
    """Split of a document by a hash of its key; `held_out` per mille go to validation and to test.

    Adding documents never moves another one.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "little") % 1000
    return "validation" if share < held_out else "test" if share < 2 * held_out else "train"
