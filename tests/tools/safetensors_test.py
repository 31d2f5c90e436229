"""Files of weights: read as the format says, written to be read, refused when damaged."""

import json

import ml_dtypes
import numpy as np
import pytest

from aodiff.checkpoint import CheckpointError
from aodiff.tools.safetensors import INDEX, open_tensors, write_tensors
from tests.tools import published

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.c": np.arange(5).astype(ml_dtypes.bfloat16),
    "d": np.ones((2, 1, 2), np.float32),
}
LAYOUT = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}


def same(found):
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()
        assert isinstance(found[name], np.memmap) and found[name].shape == array.shape


def test_reads_a_file_that_follows_the_format(tmp_path):
    published.write_file(tmp_path / "any.safetensors", ARRAYS)
    same(open_tensors(tmp_path))
    same(open_tensors(tmp_path / "any.safetensors"))


def test_writes_what_it_reads_and_aligned(tmp_path):
    (file,) = write_tensors(tmp_path / "out", LAYOUT, ARRAYS.items(), 10**9)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header["a"]["data_offsets"] == [0, 24]
    assert header["b.c"] == {"dtype": "BF16", "shape": [5], "data_offsets": [24, 34]}
    assert np.frombuffer(data[8 + length :][:24], np.float32).tolist() == list(range(6))
    same(open_tensors(tmp_path / "out"))


def test_shards_have_an_index_and_their_order_is_the_layout(tmp_path):
    files = write_tensors(tmp_path, LAYOUT, ARRAYS.items(), 36)
    assert [file.name for file in files] == [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 24 + 10 + 16
    assert [index["weight_map"][k][10] for k in ARRAYS] == ["1", "1", "2"]
    same(open_tensors(tmp_path))
    with pytest.raises(ValueError, match="give them in its order"):
        write_tensors(tmp_path, LAYOUT, reversed(ARRAYS.items()), 36)


def shards(path):
    write_tensors(path, LAYOUT, ARRAYS.items(), 36)


def lose_shard(path):
    shards(path)
    (path / "model-00002-of-00002.safetensors").unlink()


def lose_index(path):
    shards(path)
    (path / INDEX).unlink()


def wrong_index(path):
    shards(path)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["e"] = index["weight_map"].pop("d")
    (path / INDEX).write_text(json.dumps(index))


def number_index(path):
    (path / INDEX).write_text('{"weight_map": {"a": 3}}')


def no_index(path):
    (path / INDEX).write_text("[]")


def edited(change):
    def write(path):
        published.write_file(path / "model.safetensors", ARRAYS)
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(change(data))

    return write


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "holds no safetensors file"),
        (lambda path: (path / "pytorch_model.bin").touch(), "unpickling runs code .*save_file"),
        (lambda path: (path / "last.ckpt").touch(), "unpickling runs code"),
        (lose_shard, r"lacks 1 of 2 shards \(model-00002-of-00002"),
        (lose_index, "2 safetensors files and no model.safetensors.index"),
        (wrong_index, "disagree on d, e"),
        (number_index, "is no index of shards"),
        (no_index, "is no index of shards"),
        (edited(lambda data: data[:-3]), "bytes and its header speaks of"),
        (edited(lambda data: data[:20]), "bytes and its header speaks of"),
        (edited(lambda data: data + b"..."), "bytes and its header speaks of"),
        (edited(lambda data: data[:8] + b"}" + data[9:]), "no header of safetensors"),
        (edited(lambda data: data.replace(b"BF16", b"F16 ")), "as F16 ; F32 and BF16 are supp"),
        (edited(lambda data: data.replace(b"[0, 24]", b"[-8,16]")), "a, F32 of .* bytes -8 to 16"),
        (edited(lambda data: data.replace(b"[5]", b"[6]")), "b.c, BF16 of .* bytes 24 to 34"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, write, words):
    write(tmp_path)
    with pytest.raises(CheckpointError, match=words) as error:
        open_tensors(tmp_path)
    assert "\n" not in str(error.value)
