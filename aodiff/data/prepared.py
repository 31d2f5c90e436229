"""Data that `prepare` or tfds wrote: a directory described by data.json, its last file."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from aodiff.data.info import DataError, DataInfo, Stats
from aodiff.data.sources import ArrayRecordSource, Source, TokensSource
from aodiff.data.tokenizers import make_tokenizer

TFDS = "tfds:"


def data_dir(directory: str | None) -> Path:
    """Where prepared data live: the argument, else $AODIFF_DATA_DIR, else ~/aodiff_data."""
    return Path(directory or os.environ.get("AODIFF_DATA_DIR") or "~/aodiff_data").expanduser()


def prepare_command(config: ConfigDict) -> str:
    """The command that makes the data this config asks for."""
    where = f" --dir={config.dir}" if config.dir else ""
    name = config.name if "/" not in config.name else Path(config.name).name
    return (
        f"python -m aodiff.data.prepare --name={name} --source=FILES "
        f"--tokenizer={config.tokenizer} --packing=concat --length={config.seq_len}{where}"
    )


def read_meta(directory: Path) -> dict[str, Any]:
    """Contents of data.json."""
    try:
        return json.loads((directory / "data.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{directory} is incomplete (data.json cannot be read: {error}); delete it and prepare "
            "the data again."
        ) from error


def versions(root: Path) -> list[Path]:
    """Complete version directories under a data set's directory, sorted."""
    return sorted(
        path.parent for path in root.glob("*/data.json") if ".tmp-" not in path.parent.name
    )


def mismatch(meta: dict[str, Any], config: ConfigDict) -> str | None:
    """What keeps prepared data from serving this config, or None."""
    length = meta["transform"]["length"]
    if length != config.seq_len:
        return f"prepared with length {length}, data.seq_len is {config.seq_len}"
    tokenizer, wanted = meta["tokenizer"], make_tokenizer(config.tokenizer)
    if tokenizer["sha256"] != wanted.fingerprint:
        return (
            f"prepared with tokenizer {tokenizer['spec']!r} ({tokenizer['sha256'][:12]}), "
            f"data.tokenizer is {config.tokenizer!r} ({wanted.fingerprint[:12]})"
        )
    return None


def find(config: ConfigDict) -> Path:
    """Returns the one complete directory that fits the config."""
    root = data_dir(config.dir) / Path(config.name).expanduser()  # an absolute name stands alone
    if (root / "data.json").is_file():
        found = [root]
    else:
        found = versions(root)
    if not found:
        partial = sorted(p.name for p in root.glob("*")) if root.is_dir() else []
        if partial:
            what = f"{root} is incomplete ({', '.join(partial)})"
        else:
            from aodiff.data import DATA_SETS  # which holds this module

            built_in = ", ".join(DATA_SETS)
            what = f"data.name={config.name!r} is not built in ({built_in}), and no data at {root}"
        raise DataError(f"{what}; run: {prepare_command(config)}")
    reasons = {path: mismatch(read_meta(path), config) for path in found}
    fitting = [path for path, reason in reasons.items() if reason is None]
    if not fitting:
        path, reason = next(iter(reasons.items()))
        raise DataError(f"{path} was {reason}; change the config or run: {prepare_command(config)}")
    if len(fitting) > 1:
        names = [f"{config.name}/{path.name}" for path in fitting]
        raise DataError(f"{len(fitting)} prepared versions fit; set data.name to one of {names}.")
    return fitting[0]


def describe(config: ConfigDict) -> DataInfo:
    """The text of `config`, whether or not it is there yet."""
    tokenizer = make_tokenizer(config.tokenizer)
    return DataInfo(
        name=config.name,
        seq_len=config.seq_len,
        vocab_size=tokenizer.vocab_size,
        unit=tokenizer.unit,
        tokenizer=tokenizer,
    )


def open_directory(directory: Path) -> dict[str, TokensSource]:
    """Opens every split of a prepared directory; file sizes are compared first."""
    meta = read_meta(directory)
    result = {}
    for split, entry in meta["splits"].items():
        files = {
            name: (directory / f"{split}.{name}.bin", field["dtype"], tuple(field["shape"]))
            for name, field in meta["fields"].items()
        }
        stats = Stats(entry["rows"], entry["tokens"], entry["bytes"], entry["documents"])
        result[split] = TokensSource(files, stats, f"{meta['fingerprint']}/{split}")
    return result


def open_tfds(directory: Path) -> dict[str, ArrayRecordSource]:
    """Opens the splits of a version directory that tfds prepared as array_record."""
    # The import takes most of a second, and runs on other data never need it.
    import tensorflow_datasets as tfds

    if not (directory / "dataset_info.json").is_file():
        raise DataError(
            f"{directory} holds no tfds data (dataset_info.json is missing); pass the version "
            "directory that download_and_prepare wrote."
        )
    builder = tfds.builder_from_directory(str(directory))
    if builder.info.file_format.value not in ("array_record", "parquet"):
        raise DataError(
            f"{directory} is {builder.info.file_format.value}, which has no random access; prepare "
            "it again with file_format='array_record'."
        )
    fingerprint = hashlib.sha256((directory / "dataset_info.json").read_bytes()).hexdigest()
    try:
        return {
            split: ArrayRecordSource(
                builder.as_data_source(split=split), f"{directory} {split}", fingerprint
            )
            for split in builder.info.splits
        }
    except Exception as error:
        raise DataError(f"{directory} cannot be opened ({error}); copy it again.") from error


def open_splits(config: ConfigDict) -> dict[str, Source]:
    """Opens the files of the data set by split; DataError if they are absent or do not fit."""
    if not config.name.startswith(TFDS):
        return open_directory(find(config))
    directory = Path(config.name.removeprefix(TFDS)).expanduser()
    sources = open_tfds(directory)
    for source in sources.values():
        length = source.stats.tokens // max(1, source.stats.rows)
        if length != config.seq_len:
            raise DataError(
                f"{source.name} has rows of {length} tokens, data.seq_len is {config.seq_len}; "
                f"set data.seq_len={length}."
            )
    return sources
