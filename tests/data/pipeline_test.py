"""Shuffle, step-indexed batches, meshes, processes, evaluation coverage."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from aodiff.data import pipeline
from aodiff.data.info import DataError, Stats
from aodiff.data.sources import ArraySource, PermutedSource

N, LENGTH, BATCH = 21, 4, 8
ROOT = Path(__file__).parents[2]


def source(n: int = N, **fields: np.ndarray) -> ArraySource:
    tokens = np.arange(n * LENGTH, dtype=np.uint16).reshape(n, LENGTH)
    return ArraySource({"tokens": tokens, **fields}, Stats(n, n * LENGTH))


def sharding(data: int, fsdp: int, model: int) -> NamedSharding:
    devices = np.array(jax.devices()[: data * fsdp * model]).reshape(data, fsdp, model)
    mesh = Mesh(devices, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000, 2**20 + 7])
def test_permutation_is_a_bijection(n):
    image = pipeline.permute(np.arange(n), n, seed=3, epoch=2)
    assert np.array_equal(np.sort(image), np.arange(n))


def test_permutation_is_pinned():
    """Data positions in old checkpoints depend on these numbers: they must never change."""
    assert pipeline.permute(np.arange(10), 10, seed=0).tolist() == [8, 7, 9, 1, 0, 6, 5, 3, 2, 4]
    large = pipeline.permute(np.array([0, 1, 10**9]), 10**12 + 39, seed=7, epoch=3)
    assert large.tolist() == [343172534278, 650502928666, 275531786093]


def test_permutation_looks_random():
    """Images of 0 over seeds are uniform, and neighbours do not stay neighbours."""
    n, draws = 12, 3000
    first = [int(pipeline.permute(np.array([0]), n, seed)[0]) for seed in range(draws)]
    chi2 = ((np.bincount(first, minlength=n) - draws / n) ** 2).sum() / (draws / n)
    assert chi2 < 31.3  # 0.1 % quantile of chi-square with 11 degrees of freedom
    image = pipeline.permute(np.arange(1000), 1000, seed=0)
    assert (np.abs(np.diff(image)) == 1).sum() < 10  # 2 expected


def test_each_epoch_sees_every_row_once_and_epochs_differ():
    stream = pipeline.stream_rows(np.arange(3 * N), N, seed=0).reshape(3, N)
    assert (np.sort(stream, axis=1) == np.arange(N)).all()
    assert len({tuple(epoch) for epoch in stream.tolist()}) == 3


def test_batches_tile_the_stream_across_an_epoch_boundary():
    rows = np.arange(BATCH)
    ids = [pipeline.host_batch(source(), BATCH, 5, k, rows)["example_id"] for k in range(6)]
    assert np.array_equal(np.concatenate(ids), pipeline.stream_rows(np.arange(48), N, 5))


@pytest.mark.parametrize(
    "shape", [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8), (1, 1, 1)]
)
def test_batches_do_not_depend_on_the_mesh(shape):
    place = sharding(*shape)
    batches = pipeline.train_batches(source(), BATCH, place, seed=1, start_step=2, prefetch=2)
    for step in (2, 3):
        batch = next(batches)
        expected = pipeline.host_batch(source(), BATCH, 1, step, np.arange(BATCH))
        for name, array in batch.items():
            np.testing.assert_array_equal(np.asarray(array), expected[name])
            assert array.sharding.is_equivalent_to(place, array.ndim)
    assert batch["tokens"].dtype == np.int32 and batch["loss_mask"].dtype == bool
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_starting_at_a_step_continues_the_run(prefetch):
    place = sharding(1, 1, 1)
    run = pipeline.train_batches(source(), BATCH, place, 0, 0, prefetch)
    ids = [np.asarray(next(run)["example_id"]) for _ in range(5)]
    resumed = pipeline.train_batches(source(), BATCH, place, 0, 4, prefetch)
    np.testing.assert_array_equal(np.asarray(next(resumed)["example_id"]), ids[4])
    run.close()
    resumed.close()


def test_shuffle_follows_the_seed():
    rows = np.arange(BATCH)
    a, b = (pipeline.host_batch(source(), BATCH, s, 0, rows)["example_id"] for s in (0, 1))
    assert not np.array_equal(a, b)


def test_split_smaller_than_a_batch_is_refused():
    with pytest.raises(DataError, match="5 rows, fewer than one global batch of 8"):
        pipeline.train_batches(source(5), BATCH, sharding(1, 1, 1), 0)


@pytest.mark.parametrize("n", [5, 8, 21])
def test_evaluation_sees_every_row_once_in_file_order(n):
    batches = list(pipeline.eval_batches(source(n), BATCH, sharding(2, 2, 2)))
    assert all(batch["tokens"].shape == (BATCH, LENGTH) for batch in batches)
    ids = np.concatenate([np.asarray(b["example_id"]) for b in batches])
    mask = np.concatenate([np.asarray(b["loss_mask"]) for b in batches])
    tokens = np.concatenate([np.asarray(b["tokens"]) for b in batches])
    assert ids[:n].tolist() == list(range(n)) and (ids[n:] == -1).all()
    assert mask[:n].all() and not mask[n:].any()
    np.testing.assert_array_equal(tokens[:n], source(n).arrays["tokens"])


def test_rows_of_different_lengths_have_no_hidden_order():
    fields = {"tokens": np.zeros((2, 4)), "length": np.array([2, 4])}
    with pytest.raises(DataError, match="data.permute_seed"):
        PermutedSource(ArraySource(fields, Stats(2, 8)), (3, 2, 1, 0))


def test_what_is_scored_and_given_comes_from_the_fields():
    fields = {
        "length": np.array([4, 2, 3]),
        "prompt_len": np.array([0, 1, 0]),
        "present": np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]], bool),
    }
    rows = np.arange(3)
    batch = pipeline.as_batch(source(3, **fields).read(rows), rows)
    assert batch["loss_mask"].astype(int).tolist() == [[1, 1, 1, 1], [0, 1, 0, 0], [1, 0, 1, 0]]
    assert batch["given"].astype(int).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    fields = {"length": np.array([4]), "given": np.array([[1, 0, 0, 1]], bool)}
    batch = pipeline.as_batch(source(1, **fields).read(rows[:1]), rows[:1])
    assert batch["loss_mask"].astype(int).tolist() == [[0, 1, 1, 0]]


def test_an_error_in_the_reader_reaches_the_caller():
    class Broken(ArraySource):
        def read(self, rows):
            raise DataError("rows 1 to 2 cannot be read.")

    broken = Broken(source().arrays, source().stats)
    batches = pipeline.train_batches(broken, BATCH, sharding(1, 1, 1), 0)
    with pytest.raises(DataError, match="rows 1 to 2"):
        next(batches)
    batches.close()


PROCESS = """
    import json, sys
    import jax, numpy as np
    jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from aodiff.data import pipeline
    from aodiff.data.info import Stats
    from aodiff.data.sources import ArraySource

    tokens = np.arange(84, dtype=np.uint16).reshape(21, 4)
    seen = {}
    for shape in ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)):
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "model"))
        place = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        source = ArraySource({"tokens": tokens}, Stats(21, 84))
        batches = pipeline.train_batches(source, 8, place, seed=1)
        ids = next(batches)["example_id"]
        batches.close()
        seen[str(shape)] = {s.index[0].start or 0: np.asarray(s.data).tolist()
                            for s in ids.addressable_shards}
    print(json.dumps(seen))
"""


def test_two_processes_read_the_same_global_batch(tmp_path):
    """Also with rows held by both processes, as when the model axis spans hosts."""
    script = tmp_path / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(ROOT)
    args = [[sys.executable, str(script), port, str(i)] for i in range(2)]
    running = [subprocess.Popen(a, env=env, stdout=subprocess.PIPE, text=True) for a in args]
    outputs = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in running]
    expected = pipeline.host_batch(source(), BATCH, 1, 0, np.arange(BATCH))["example_id"].tolist()
    for shape in outputs[0]:
        joined = {int(k): v for output in outputs for k, v in output[shape].items()}
        for output in outputs:
            assert all(joined[int(k)] == v for k, v in output[shape].items())
        assert sum((joined[k] for k in sorted(joined)), []) == expected, shape
