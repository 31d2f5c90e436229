"""Preparation: determinism, conservation, every refusal, and the way back into training."""

import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from aodiff.config import base
from aodiff.data import DataError, describe, open_splits, prepare, prepared, readers
from aodiff.data.builders import write_array_record

LENGTH = 16
TEXTS = [f"document {i}: " + "lorem \u00e9psum " * (i % 7) for i in range(300)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines[:100]))
    (folder / "deep").mkdir()
    with gzip.open(folder / "deep" / "b.jsonl.gz", "wt") as file:
        file.writelines(lines[100:])
    (folder / "ignored.md").write_text("no")
    return folder


def arguments(corpus: Path, data: Path, *more: str) -> list[str]:
    common = ["--name=t", f"--length={LENGTH}", f"--dir={data}", "--held_out=50"]
    return [*common, "--source", str(corpus), *more]


def config(data: Path, **values):
    c = base().data
    c.name, c.dir, c.seq_len = "t", str(data), LENGTH
    c.update(values)
    return c


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    message = prepare.run(arguments(corpus, folder))
    assert message.startswith("prepared") and "first row" in message
    return folder


def files(root: Path) -> dict[str, bytes]:
    paths = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("processes", [1, 3])
def test_same_inputs_give_the_same_bytes(corpus, data, tmp_path, processes, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARACTERS", 1000)
    prepare.run(arguments(corpus, tmp_path, f"--processes={processes}"))
    assert files(tmp_path) == files(data)


def test_rows_are_the_documents_of_their_split(data):
    splits = open_splits(config(data))
    keys = [f"a.jsonl:{i}" for i in range(100)] + [f"deep/b.jsonl.gz:{i}" for i in range(200)]
    for split, source in splits.items():
        stream = source.read(np.arange(len(source)))["tokens"].reshape(-1)
        mine = [t for t, k in zip(TEXTS, keys, strict=True) if readers.split_of(k, 50) == split]
        whole = b"\0".join(text.encode() for text in mine) + b"\0"
        shown = bytes(np.where(stream == 256, 0, stream).astype(np.uint8))
        assert whole.startswith(shown) and len(whole) - len(shown) < LENGTH
        assert source.stats.documents == len(mine)
        assert source.stats.bytes == (stream != 256).sum()
    assert describe(config(data)).vocab_size == 257


def test_split_shares():
    share = [readers.split_of(f"doc {i}", 100) for i in range(4000)]
    # 400 expected, standard deviation 19.
    assert all(abs(share.count(split) - 400) < 80 for split in ("validation", "test"))


def test_running_again_does_nothing(corpus, data):
    before = files(data)
    assert prepare.run(arguments(corpus, data)).startswith("already prepared")
    assert prepare.run(arguments(corpus, data, "--verify")).startswith("verified")
    assert files(data) == before


def test_dry_run_writes_nothing(corpus, tmp_path):
    assert "300 documents" in prepare.run(arguments(corpus, tmp_path, "--dry_run"))
    assert not files(tmp_path)


def test_a_crash_leaves_no_data_set(corpus, tmp_path, monkeypatch):
    def crash(meta):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "fingerprint", crash)
    with pytest.raises(KeyboardInterrupt):
        prepare.run(arguments(corpus, tmp_path))
    assert not files(tmp_path)


def test_a_killed_run_is_reported_and_ignored(corpus, data, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    left = tmp_path / "t" / ".tmp-1"
    left.mkdir()
    (left / "train.tokens.bin").write_bytes(b"half")
    assert len(open_splits(config(tmp_path))["train"]) > 0
    message = prepare.run(arguments(corpus, tmp_path, "--version=2.0.0"))
    assert f"left over from interrupted runs: {left}" in message


def test_padded_rows(corpus, tmp_path):
    prepare.run(arguments(corpus, tmp_path, "--packing=pad", "--length=48", "--too_long=drop"))
    source = open_splits(config(tmp_path, seq_len=48))["train"]
    row = source.read(np.arange(len(source)))
    assert source.fields == ("tokens", "length")
    ends = row["tokens"][np.arange(len(source)), row["length"].astype(int) - 1]
    assert (ends == 256).all() and row["length"].max() <= 48
    assert source.stats.bytes == row["length"].sum() - len(source)


def test_published_splits_and_layouts(tmp_path):
    (tmp_path / "train.txt").write_bytes("one\n\ntwo\n \nthree".encode("utf-8-sig"))
    (tmp_path / "test.txt").write_text("four<|endoftext|>five")
    source = [f"train={tmp_path}/tr*.txt", f"test={tmp_path}/test.txt"]
    args = ["--name=t", "--length=4", f"--dir={tmp_path}", "--source", *source]
    prepare.run([*args, "--layout=blank"])
    splits = open_splits(config(tmp_path, seq_len=4))
    assert set(splits) == {"train", "test"}
    assert splits["train"].stats.documents == 3
    first = splits["train"].read(np.arange(3))["tokens"].reshape(-1)
    assert first.tolist() == [*b"one", 256, *b"two", 256, *b"thre"]
    cut = readers.LAYOUTS["endoftext"]("four<|endoftext|>five")
    assert cut == ["four", "five"] and readers.LAYOUTS["line"]("a\nb") == ["a\n", "b"]


def test_array_record_equals_tokens(data, tmp_path):
    splits = open_splits(config(data))
    directory = write_array_record("rows", splits, tmp_path)
    reread = open_splits(config(data, name=f"tfds:{directory}"))
    assert set(reread) == set(splits)
    for split, source in splits.items():
        rows = np.random.default_rng(0).permutation(len(source))
        a, b = source.read(rows), reread[split].read(rows)
        assert set(a) == set(b) and np.array_equal(a["tokens"], b["tokens"])
        assert reread[split].stats.tokens == source.stats.tokens
    with pytest.raises(DataError, match="rows of 16 tokens, data.seq_len is 8; set"):
        open_splits(config(data, name=f"tfds:{directory}", seq_len=8))
    record = next(directory.glob("*train*"))
    record.write_bytes(record.read_bytes()[:-5000])
    with pytest.raises(DataError, match="train: rows 0 to 0 cannot be read"):
        open_splits(config(data, name=f"tfds:{directory}"))


def test_absent_data_name_their_command(tmp_path):
    with pytest.raises(DataError) as error:
        open_splits(config(tmp_path, name="owt", tokenizer="gpt2", seq_len=1024))
    assert "is not built in (pydoc_topics, " in str(error.value)
    command = str(error.value).split("run: python -m aodiff.data.prepare ")[1]
    options, args = prepare.parse(command.split())
    assert (options.name, options.tokenizer, options.length) == ("owt", "gpt2", 1024)
    assert args.dir == str(tmp_path)


def damaged(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    return next((tmp_path / "t").iterdir())


def test_truncated_file(data, tmp_path):
    path = damaged(data, tmp_path) / "train.tokens.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{size - 2} bytes, data.json says {size}"):
        open_splits(config(tmp_path))


def test_missing_file(data, tmp_path):
    (damaged(data, tmp_path) / "test.tokens.bin").unlink()
    with pytest.raises(DataError, match="test.tokens.bin is missing"):
        open_splits(config(tmp_path))


def test_changed_byte_is_found_by_verify(corpus, data, tmp_path):
    path = damaged(data, tmp_path) / "train.tokens.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with pytest.raises(DataError, match="differs from data.json"):
        prepare.run(arguments(corpus, tmp_path, "--verify"))


@pytest.mark.parametrize("content", [None, "{"])
def test_no_data_json(data, tmp_path, content):
    path = damaged(data, tmp_path) / "data.json"
    path.unlink()
    if content:
        path.write_text(content)
    with pytest.raises(DataError, match="is incomplete"):
        open_splits(config(tmp_path))


def test_other_length_or_tokenizer(data):
    with pytest.raises(DataError, match="prepared with length 16, data.seq_len is 32.*run: "):
        open_splits(config(data, seq_len=32))
    with pytest.raises(DataError, match=r"tokenizer 'byte' \(\w{12}\), data.tokenizer is 'char27'"):
        open_splits(config(data, tokenizer="char27"))


def test_two_fitting_versions(corpus, data, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    prepare.run(arguments(corpus, tmp_path, "--version=2.0.0"))
    with pytest.raises(DataError, match="2 prepared versions fit; set data.name") as error:
        open_splits(config(tmp_path))
    name = re.findall(r"'(t/[^']+)'", str(error.value))[0]
    assert set(open_splits(config(tmp_path, name=name))) == {"train", "validation", "test"}
    assert set(open_splits(config(Path("/"), name=str(tmp_path / name)))) >= {"train"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"ab\xffcd", "not UTF-8 at byte 2.*--errors=replace"),
        ("x.txt", b"\xc3\xa9a\0", r"'\\x00' at byte 3"),
        ("x.txt", b"a\r\nb\rc", r"'\\r' at byte 4"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b"}', r"line 2 has no text field 'text'.*\['txt'\]"),
        ("x.jsonl", b'{"text": "a"}\n{"text"', "line 2 is not JSON"),
        ("x.jsonl", b"[1]\n", "line 1 has no text field 'text', it has list"),
        ("x.csv", b"a", "has no files ending in"),
        ("x.txt", b"tiny", "train gets 1 documents and no full row.*--layout"),
    ],
)
def test_bad_input(tmp_path, name, content, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare.run(arguments(tmp_path / "in", tmp_path / "out"))
    assert not files(tmp_path / "out")


def test_replace_keeps_going(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"a\xff\0\rb")
    item = readers.list_inputs([str(tmp_path / "x.txt")])[0]
    assert list(readers.documents(item, "file", "text", "replace")) == [
        ("x.txt", "a\ufffd\ufffd\nb")
    ]


def test_bad_source_split(tmp_path):
    with pytest.raises(DataError, match="names split 'dev'; use one of"):
        readers.list_inputs(["dev=x.txt"])


def test_command_line_prints_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prepare", *arguments(tmp_path / "no", tmp_path)])
    with pytest.raises(SystemExit, match="^DataError: source .* has no files"):
        prepare.main()


def test_fingerprint_ignores_library_version_and_folder(data):
    meta = prepared.read_meta(next((data / "t").iterdir()))
    assert prepare.fingerprint({**meta, "created_by": "9"}) == meta["fingerprint"]
    assert str(data) not in json.dumps(meta)
