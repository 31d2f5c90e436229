"""`python -m aodiff.data.bench`: tokens per CPU-second of every way to read, as one JSON object.

Wall-clock depends on who else uses the machine; ratios of CPU time do not.
"""

import argparse
import contextlib
import functools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grain
import jax
import numpy as np

from aodiff.data import builders, prepared
from aodiff.data.corpora import pydoc_topics
from aodiff.data.info import DataError, Stats
from aodiff.data.packing import Concat, encoded
from aodiff.data.pipeline import as_batch, host_batch, permute, train_batches
from aodiff.data.sources import Source, TokensSource
from aodiff.data.tokenizers import make_tokenizer

LENGTH, BATCH = 1024, 64


def rate(work: Callable[[], int], seconds: float) -> float:
    """Mtok per CPU-second of this process, all threads; `work` returns the tokens it handled."""
    work()
    tokens, start = 0, time.process_time()
    while (spent := time.process_time() - start) < seconds:
        tokens += work()
    return tokens / spent / 1e6


def counted(step: Callable[[int], object], tokens: int) -> Callable[[], int]:
    """Turns a function of the step into one that counts tokens and steps by itself."""
    state = {"step": 0}

    def work() -> int:
        step(state["step"])
        state["step"] += 1
        return tokens

    return work


def iterate(batches: Iterator, seconds: float) -> float:
    """Rate of an iterator, which is then closed: reading ahead would be charged to the next one."""
    result = rate(lambda: len(next(batches)["tokens"]) * LENGTH, seconds)
    batches.close()
    return result


def per_record(source: Source) -> Iterator:
    """The usual way: one element per record, shuffled and batched by grain."""
    n = len(source)

    class Records:
        def __len__(self):
            return n

        def __getitem__(self, i):
            row = np.array([i])
            return {name: x[0] for name, x in as_batch(source.read(row), row).items()}

    dataset = grain.MapDataset.source(Records()).shuffle(seed=0).repeat().batch(BATCH)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))


def measure(source: Source, records: Source, seconds: float) -> dict[str, float]:
    """Mtok per CPU-second by path."""
    tokens, rows = LENGTH * BATCH, np.arange(BATCH)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    n = len(source)
    paths = {
        "tokens: gather": lambda k: source.read(permute(rows, n, k)),
        "tokens: host batch": lambda k: host_batch(source, BATCH, 0, k, rows),
        "array_record: host batch": lambda k: host_batch(records, BATCH, 0, k, rows),
    }
    result = {name: rate(counted(step, tokens), seconds) for name, step in paths.items()}
    for name, one in (("tokens", source), ("array_record", records)):
        result[f"{name}: train_batches"] = iterate(train_batches(one, BATCH, place, 0), seconds)
        result[f"{name}: per record"] = iterate(per_record(one), seconds)
    texts = list(pydoc_topics().values())
    for kind in ("byte", "gpt2"):
        try:
            result[f"prepare: {kind}"] = rate(functools.partial(_pack, texts, kind), seconds)
        except DataError:
            continue  # the tokenizer's files are not here
    return result


def _pack(texts: list[str], kind: str) -> int:
    packer = Concat(LENGTH)
    return sum(packer.add(ids)["tokens"].size for ids in encoded(texts, make_tokenizer(kind)))


def first_batch(source: Source, step: int) -> float:
    """Seconds from nothing to the batch of one step."""
    start = time.perf_counter()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    batches = train_batches(source, BATCH, place, seed=0, start_step=step)
    jax.block_until_ready(next(batches))
    batches.close()
    return time.perf_counter() - start


def cpu_model() -> str:
    """Name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def run(rows: int, seconds: float) -> dict[str, object]:
    """Makes `rows` random rows in both formats and measures every path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.tokens.bin"
        words = np.random.default_rng(0).integers(0, 257, (rows, LENGTH), np.uint16)
        path.write_bytes(words.astype("<u2").tobytes())
        source = TokensSource(
            {"tokens": (path, "<u2", (LENGTH,))}, Stats(rows, rows * LENGTH), "bench"
        )
        # tfds reports progress on stdout, which belongs to the JSON.
        with contextlib.redirect_stdout(sys.stderr):
            written = builders.write_array_record("bench", {"train": source}, Path(folder))
        records = prepared.open_tfds(written)["train"]
        rates = measure(source, records, seconds)
        start = {f"step {step}": first_batch(source, step) for step in (0, 10**6)}
    return {
        "cpu": cpu_model(),
        "record tokens": LENGTH,
        "batch": BATCH,
        "Mtok per CPU-second": {name: round(x, 2) for name, x in rates.items()},
        "seconds to first batch": {name: round(x, 4) for name, x in start.items()},
        "ratios": {
            "batch element / per record": rates["tokens: host batch"] / rates["tokens: per record"],
            "tokens / array_record": rates["tokens: host batch"]
            / rates["array_record: host batch"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aodiff.data.bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time per path")
    args = parser.parse_args()
    print(json.dumps(run(args.rows, args.seconds), indent=1))


if __name__ == "__main__":
    main()
