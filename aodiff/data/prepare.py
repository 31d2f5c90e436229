"""`python -m aodiff.data.prepare`: local text files to rows of ids that training maps into memory.

A pure function of input bytes, tokenizer and options: the same inputs give byte-identical files,
with any number of processes. data.json is written last; without it, a directory does not exist.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import aodiff
from aodiff.data import prepared
from aodiff.data.detokenizers import DETOKENIZERS
from aodiff.data.info import DataError
from aodiff.data.packing import Concat, Pad, end_document, text_bytes
from aodiff.data.readers import END_OF_TEXT, LAYOUTS, SPLITS, documents, list_inputs, split_of
from aodiff.data.tokenizers import make_tokenizer

FORMAT = 1
BATCH_CHARACTERS = 1 << 20  # text sent to a process at once


@dataclasses.dataclass(frozen=True)
class Options:
    """What the output depends on, apart from the input files; see `parse`."""

    name: str
    source: tuple[str, ...]
    tokenizer: str
    packing: str
    length: int
    layout: str = "file"
    field: str = "text"
    detokenizer: str = "none"
    too_long: str = "drop"
    errors: str = "strict"
    held_out: int = 5
    version: str = "1.0.0"


def plan(options: Options) -> dict[str, Any]:
    """The part of data.json that is known before any text is encoded."""
    tokenizer = make_tokenizer(options.tokenizer)
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    fields = {"tokens": {"dtype": dtype, "shape": [options.length]}}
    if options.packing == "pad":
        fields["length"] = {"dtype": "<u2", "shape": []}
    chosen = dataclasses.asdict(options)
    for elsewhere in ("name", "source", "tokenizer", "version"):
        del chosen[elsewhere]
    return {
        "format": FORMAT,
        "name": options.name,
        "version": options.version,
        "source": [item.describe() for item in list_inputs(options.source)],
        "tokenizer": {
            "spec": options.tokenizer.split(":")[0],
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos": tokenizer.eos,
        },
        "transform": chosen,
        "fields": fields,
    }


def fingerprint(meta: dict[str, Any]) -> str:
    """sha256 of the canonical JSON of everything but itself and the library's version."""
    kept = {k: v for k, v in meta.items() if k not in ("created_by", "fingerprint")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _read(options: Options) -> Iterator[tuple[str, str]]:
    """(split, text) of every document, in the order of the files."""
    for item in list_inputs(options.source):
        for key, text in documents(item, options.layout, options.field, options.errors):
            yield item.split or split_of(key, options.held_out), text


def _batches(items: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += len(item[1])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclasses.dataclass(frozen=True)
class _Encode:
    """Encodes a batch of (split, text) to (split, ids, bytes, characters, has a literal eos)."""

    tokenizer: str
    detokenizer: str

    def __call__(
        self, batch: list[tuple[str, str]]
    ) -> list[tuple[str, np.ndarray, int, int, bool]]:
        tokenizer = make_tokenizer(self.tokenizer)
        clean = DETOKENIZERS[self.detokenizer]
        result = []
        for split, text in batch:
            ids = tokenizer.encode(clean(text))
            size = len(text.encode()) if tokenizer.lossless else text_bytes(tokenizer, ids)
            ids = end_document(tokenizer, ids)
            result.append((split, ids, size, len(text), END_OF_TEXT in text))
        return result


class _SplitWriter:
    """Packs the documents of one split into its files."""

    def __init__(self, folder: Path, split: str, meta: dict[str, Any], tokenizer):
        transform, length = meta["transform"], meta["transform"]["length"]
        self._fields, self._tokenizer, self._length = meta["fields"], tokenizer, length
        self.packer = (
            Pad(length, tokenizer.eos or 0, transform["too_long"])
            if transform["packing"] == "pad"
            else Concat(length)
        )
        self._paths = {name: folder / f"{split}.{name}.bin" for name in self._fields}
        self._files = {name: path.open("wb") for name, path in self._paths.items()}
        self.counts = dict.fromkeys(
            ("rows", "tokens", "real_tokens", "bytes", "characters", "documents"), 0
        )

    def add(self, ids: np.ndarray, size: int, characters: int) -> None:
        if ids.size and int(ids.max()) >= self._tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave id {ids.max()}, its vocabulary ends at "
                f"{self._tokenizer.vocab_size - 1}; its files do not belong together."
            )
        rows = self.packer.add(ids)
        for name, array in rows.items():
            self._files[name].write(array.astype(self._fields[name]["dtype"]).tobytes())
        if size and len(ids) > self._length and isinstance(self.packer, Pad):
            size = text_bytes(self._tokenizer, rows["tokens"].reshape(-1))
        real = int(rows["length"].sum()) if "length" in rows else rows["tokens"].size
        new = (len(rows["tokens"]), rows["tokens"].size, real, size, characters, 1)
        for name, count in zip(self.counts, new, strict=True):
            self.counts[name] += count

    def finish(self) -> dict[str, Any]:
        """Closes the files and returns their entry in data.json."""
        for file in self._files.values():
            file.close()
        rest = text_bytes(self._tokenizer, self.packer.rest())
        entry: dict[str, Any] = {**self.counts, "bytes": self.counts["bytes"] - rest}
        entry["dropped_documents"] = self.packer.dropped_documents
        entry["dropped_tokens"] = self.packer.dropped_tokens
        entry["files"] = {name: _file_entry(path) for name, path in self._paths.items()}
        return entry


def _file_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _encoded(options: Options, processes: int) -> Iterator[tuple[str, np.ndarray, int, int, bool]]:
    encode = _Encode(options.tokenizer, options.detokenizer)
    batches = _batches(_read(options))
    with contextlib.ExitStack() as stack:
        if processes > 1:
            # A forked child would inherit the locks of threads that it does not have.
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(processes))
            results = pool.imap(encode, batches)
        else:
            results = map(encode, batches)
        yield from itertools.chain.from_iterable(results)


def write(options: Options, meta: dict[str, Any], root: Path, processes: int) -> tuple[Path, dict]:
    """Encodes, packs and writes all splits; returns the finished directory and its data.json."""
    tokenizer = make_tokenizer(options.tokenizer)
    folder = root / f".tmp-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        writers = {split: _SplitWriter(folder, split, meta, tokenizer) for split in SPLITS}
        literal = 0
        for split, ids, size, characters, has_literal in _encoded(options, processes):
            writers[split].add(ids, size, characters)
            literal += has_literal
        entries = {split: writer.finish() for split, writer in writers.items()}
        meta = {**meta, "documents_with_literal_eos": literal}
        meta["splits"] = {split: entry for split, entry in entries.items() if entry["rows"]}
        for split in SPLITS:
            if split not in meta["splits"]:
                for path in folder.glob(f"{split}.*.bin"):
                    path.unlink()
        _check_splits(meta, entries)
        meta["fingerprint"] = fingerprint(meta)
        meta["created_by"] = aodiff.__version__
        final = root / f"{options.version}-{meta['fingerprint'][:8]}"
        (folder / "data.json").write_text(json.dumps(meta, indent=1) + "\n")
        prepared.open_directory(folder)
        folder.rename(final)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return final, meta


def _check_splits(meta: dict[str, Any], entries: dict[str, Any]) -> None:
    published = {item["split"] for item in meta["source"]}
    wanted = {"train", "validation"} if None in published else published
    for split in sorted(wanted - set(meta["splits"])):
        entry = entries[split]
        raise DataError(
            f"{split} gets {entry['documents']} documents and no full row; name the files of each "
            "split (--source validation=FILE), cut files into smaller documents (--layout=line), "
            "raise --held_out or lower --length."
        )


def verify(directory: Path) -> None:
    """Raises DataError unless every file has the hash that data.json records."""
    meta = prepared.read_meta(directory)
    for split, entry in meta["splits"].items():
        for name, expected in entry["files"].items():
            path = directory / f"{split}.{name}.bin"
            if _file_entry(path) != expected:
                raise DataError(
                    f"{path} differs from data.json; delete {directory} and prepare it."
                )
    if fingerprint(meta) != meta["fingerprint"]:
        raise DataError(f"{directory / 'data.json'} was edited; delete {directory} and prepare it.")


def existing(meta: dict[str, Any], root: Path) -> Path | None:
    """A complete directory made by the same plan, or None."""
    for directory in prepared.versions(root):
        found = prepared.read_meta(directory)
        if all(found.get(key) == value for key, value in meta.items()):
            return directory
    return None


def summary(directory: Path, meta: dict[str, Any], tokenizer) -> str:
    """What was written, in words and numbers."""
    lines = [f"prepared {directory}"]
    for split, entry in meta["splits"].items():
        lines.append(
            f"  {split}: {entry['documents']} documents, {entry['rows']} rows, "
            f"{entry['tokens']} tokens, {entry['bytes']} bytes "
            f"({entry['bytes'] / max(1, entry['real_tokens']):.3f} per token), "
            f"padding {1 - entry['real_tokens'] / entry['tokens']:.1%}, dropped "
            f"{entry['dropped_documents']} documents and {entry['dropped_tokens']} tokens"
        )
    if meta["documents_with_literal_eos"]:
        lines.append(
            f"  {meta['documents_with_literal_eos']} documents spell {END_OF_TEXT}; it stayed text"
        )
    source = next(iter(prepared.open_directory(directory).values()))
    row = source.read(np.array([0]))["tokens"][0]
    lines.append(f"  first row: {tokenizer.decode(row)[:200]!r}")
    return "\n".join(lines)


def sample_summary(options: Options, target: Path) -> str:
    """What a run would do, from the first 1,000 documents."""
    encode = _Encode(options.tokenizer, options.detokenizer)
    result = encode(list(itertools.islice(_read(options), 1000)))
    tokens, size = sum(len(r[1]) for r in result), sum(r[2] for r in result)
    return (
        f"dry run: would write {target}\n  first {len(result)} documents: {size} bytes, "
        f"{tokens} tokens, {size / max(1, tokens):.3f} bytes per token"
    )


def parse(argv: list[str]) -> tuple[Options, argparse.Namespace]:
    """Options of the preparation, and the flags as given."""
    parser = argparse.ArgumentParser(prog="python -m aodiff.data.prepare", description=__doc__)
    add = parser.add_argument
    add("--name", required=True, help="data set name, as in config.data.name")
    add("--source", required=True, nargs="+", help="files, folders or globs; [SPLIT=]PATH")
    add("--tokenizer", default="byte", help="byte, char27, symbols:, gpt2[:DIR], hf:, sp:")
    add("--packing", choices=("concat", "pad"), default="concat")
    add("--length", type=int, required=True, help="tokens per row")
    add("--layout", choices=tuple(LAYOUTS), default="file", help="documents of a .txt file")
    add("--field", default="text", help="text field of a .jsonl record")
    add("--detokenizer", choices=tuple(DETOKENIZERS), default="none")
    add("--too_long", choices=("drop", "truncate", "split", "error"), default="drop")
    add("--errors", choices=("strict", "replace"), default="strict")
    add("--held_out", type=int, default=5, help="per mille of documents for validation, for test")
    add("--version", default="1.0.0")
    add("--dir", default=None, help="default: $AODIFF_DATA_DIR, else ~/aodiff_data")
    add("--processes", type=int, default=1)
    add("--verify", action="store_true", help="check the files of a finished preparation")
    add("--dry_run", action="store_true", help="list inputs and encode 1,000 documents only")
    args = parser.parse_args(argv)
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(Options)}
    return Options(**{**values, "source": tuple(args.source)}), args


def run(argv: list[str]) -> str:
    """Does what the command line says and returns what to print."""
    options, args = parse(argv)
    if not 1 <= options.length <= 65535:
        raise DataError(f"--length is {options.length}; it must be between 1 and 65535.")
    root = prepared.data_dir(args.dir) / options.name
    meta = plan(options)
    done = existing(meta, root)
    if args.verify:
        if done is None:
            raise DataError(f"nothing in {root} was prepared this way; run without --verify.")
        verify(done)
        return f"verified {done}"
    if done is not None:
        return f"already prepared: {done}"
    if args.dry_run:
        return sample_summary(options, root)
    stale = sorted(str(path) for path in root.glob(".tmp-*"))
    directory, meta = write(options, meta, root, args.processes)
    note = f"\n  left over from interrupted runs: {', '.join(stale)}" if stale else ""
    return summary(directory, meta, make_tokenizer(options.tokenizer)) + note


def main() -> None:
    try:
        print(run(sys.argv[1:]))
    except DataError as error:
        sys.exit(f"DataError: {error}")
    except OSError as error:
        sys.exit(f"DataError: cannot read or write ({error}); free space or choose another --dir.")


if __name__ == "__main__":
    main()
