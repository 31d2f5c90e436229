"""Safetensors files, whole or in shards: read slice by slice, written tensor by tensor.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape,
data_offsets after the header) and the data. Shards are listed in `model.safetensors.index.json`.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from aodiff.checkpoint import CheckpointError

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PICKLED = (".bin", ".ckpt", ".pt", ".pth")
LENGTH = 8  # bytes of the length of the header


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def open(self) -> np.ndarray:
        """The tensor as a view of the file; what is read of it is what comes to memory."""
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of some files, each opened anew when it is asked for, so that none stays."""

    def __init__(self, stored: dict[str, Stored]):
        self.stored = stored

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored[name].open()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file.

    Raises:
      CheckpointError: it is no such file, it is cut, or has numbers that are not supported.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        begin = LENGTH + length
        if begin > size:
            raise _damaged(path, size, begin)
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = {name: _stored(path, name, begin, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} has no header of safetensors ({error}); download it again"
            ) from error
    end = begin + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise _damaged(path, size, end)
    return found


def _damaged(path: Path, size: int, end: int) -> CheckpointError:
    return CheckpointError(
        f"{path} has {size:,} bytes and its header speaks of {end:,}; download it again"
    )


def _stored(path: Path, name: str, begin: int, entry: dict) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path} holds {name} as {entry['dtype']}; {' and '.join(DTYPES)} are supported, "
            "convert it with the framework that wrote it"
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path} has {name}, {entry['dtype']} of shape {shape}, at bytes {start} to {end}; "
            "download it again"
        )
    return Stored(path, dtype, shape, begin + start)


def open_tensors(place: Path) -> Tensors:
    """The tensors of a file, or of a directory with one file or with an index of shards.

    Raises:
      CheckpointError: there is nothing of the kind, a shard is missing, or a file is damaged.
    """
    if place.is_file() and place.suffix == ".safetensors":
        return Tensors(read_header(place))
    if place.is_dir() and (place / INDEX).is_file():
        return Tensors(_read_shards(place / INDEX))
    files = sorted(place.glob("*")) if place.is_dir() else [place]
    whole = [file for file in files if file.suffix == ".safetensors" and file.is_file()]
    if len(whole) == 1:
        return Tensors(read_header(whole[0]))
    if whole:
        raise CheckpointError(
            f"{place} holds {len(whole)} safetensors files and no {INDEX}; name one file, or add "
            "the index that belongs to them"
        )
    if pickled := [file for file in files if file.suffix in PICKLED and file.is_file()]:
        raise CheckpointError(
            f"{pickled[0]} is pickled, and unpickling runs code of its writer; convert it once "
            'where you trust it: python -c "import torch, safetensors.torch as s; w = torch.load'
            "('FILE', weights_only=True); s.save_file(w.get('state_dict', w), "
            "'model.safetensors')\""
        )
    raise CheckpointError(
        f"{place} holds no safetensors file; name the directory of a downloaded model, or a file"
    )


def _read_shards(index: Path) -> dict[str, Stored]:
    try:
        where = json.loads(index.read_text())["weight_map"]
        shards = sorted(set(map(os.fspath, where.values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no index of shards ({error}); download it again"
        ) from error
    if missing := [name for name in shards if not (index.parent / name).is_file()]:
        raise CheckpointError(
            f"{index.parent} lacks {len(missing)} of {len(shards)} shards ({listed(missing)}); "
            "download them"
        )
    headers = {name: read_header(index.parent / name) for name in shards}
    pairs = {(name, shard) for shard, header in headers.items() for name in header}
    if other := sorted(name for name, _ in pairs ^ set(where.items())):
        raise CheckpointError(
            f"{index} and its shards disagree on {listed(other)}; download them again"
        )
    return {name: headers[shard][name] for name, shard in where.items()}


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def write_tensors(
    directory: Path,
    layout: dict[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray]],
    shard_bytes: int,
) -> list[Path]:
    """Writes one file, or shards of about `shard_bytes` with their index; returns the files.

    Args:
      directory: where; it is created.
      layout: dtype and shape of each tensor, in the order of `arrays`.
      arrays: the tensors; each is written before the next is asked for.
      shard_bytes: a shard ends before the tensor that would exceed it.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in layout.items()}
    shards, room = [[]], shard_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    files = [WHOLE]
    if len(shards) > 1:
        files = [f"model-{k + 1:05}-of-{len(shards):05}.safetensors" for k in range(len(shards))]
    directory.mkdir(parents=True, exist_ok=True)
    arrays = iter(arrays)
    for file, names in zip(files, shards, strict=True):
        _write_file(directory / file, {name: layout[name] for name in names}, arrays)
    if len(shards) > 1:
        where = {name: f for f, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=1))
    return [directory / file for file in files]


def _write_file(
    path: Path,
    layout: dict[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterator[tuple[str, np.ndarray]],
) -> None:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=NAMES[dtype], shape=shape, data_offsets=(start, end))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH)  # so that the data are aligned
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH, "little") + text)
        for name, (dtype, shape) in layout.items():
            given, array = next(arrays)
            if (given, array.dtype, array.shape) != (name, dtype, shape):
                raise ValueError(
                    f"{given} {array.dtype} {array.shape} came where the layout has {name} {dtype} "
                    f"{shape}; give them in its order."
                )
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
    part.replace(path)
