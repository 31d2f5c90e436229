"""Sampling from a trained model to `samples/<step>.jsonl`, with a figure of one sample's order."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff import figures, rng
from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.methods.base import Method, Samples
from aodiff.partitioning import shard


def generate(
    method: Method,
    params,
    extra,
    info: DataInfo,
    config,
    mesh: Mesh,
    *,
    step: int,
    workdir: pathlib.Path,
) -> pathlib.Path:
    """Draws `config.sample.num` rows and writes one JSON object per row.

    A row's randomness is keyed by its index, so it does not depend on `sample.batch` or the mesh.
    Returns the path of the file. Raises ConfigError for a prompt that does not fit.
    """
    s = config.sample
    prompt, given = place_prompt(s.prompt, s.positions, info)
    replicated = NamedSharding(mesh, PartitionSpec())
    sampler = method.sampler(config, int(given.sum()))

    def draw(params, extra, ids, prompt, given) -> Samples:
        keys = rng.example_keys(rng.stream(config.seed, rng.SAMPLE), shard(ids, "batch"))
        batch = (ids.shape[0], info.seq_len)
        tokens, given = (jnp.broadcast_to(a[None], batch) for a in (prompt, given))
        return sampler(params, extra, keys, tokens, given)

    fn = jax.jit(draw, out_shardings=replicated)
    rows = []
    for start in range(0, s.num, s.batch):
        ids = np.arange(start, start + s.batch, dtype=np.int32)
        with jax.set_mesh(mesh):
            out = jax.device_get(fn(params, extra, ids, prompt, given))
        rows += [jax.tree.map(lambda a, i=i: a[i], out) for i in range(min(s.batch, s.num - start))]
        logging.info("sampled %d of %d", len(rows), s.num)
    path = workdir / "samples" / f"{step}.jsonl"
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(_record(i, row, info, config)) for i, row in enumerate(rows)]
        path.write_text("\n".join(lines) + "\n")
        figures.generation_order(path.with_suffix(".png"), rows[0], info)
        logging.info("first sample: %s", info.text(rows[0].tokens))
        logging.info("wrote %s and %s", path, path.with_suffix(".png"))
    return path


def place_prompt(prompt: str, positions, info: DataInfo) -> tuple[np.ndarray, np.ndarray]:
    """Ids (n,) int32 and given mask (n,) bool of a prompt at `positions` (default 0, 1, ...)."""
    tokens, given = np.zeros(info.seq_len, np.int32), np.zeros(info.seq_len, bool)
    if not prompt:
        if positions:
            raise ConfigError("sample.positions is set without sample.prompt; set both or neither")
        return tokens, given
    if info.tokenizer is None:
        raise ConfigError(f"data {info.name} has no text, so sample.prompt must stay empty")
    ids = np.asarray(info.tokenizer.encode(prompt), np.int32)
    where = np.asarray(positions or range(len(ids)), np.int64)
    if len(where) != len(ids):
        raise ConfigError(
            f"sample.positions names {len(where)} positions for a prompt of {len(ids)} tokens; "
            "give one position per token"
        )
    outside = where[(where < 0) | (where >= info.seq_len)]
    if len(outside):
        raise ConfigError(
            f"prompt position {outside[0]} is out of range; positions run from 0 to "
            f"{info.seq_len - 1} (data.seq_len={info.seq_len})"
        )
    if len(np.unique(where)) != len(where):
        raise ConfigError("sample.positions repeats a position; every position may be given once")
    tokens[where], given[where] = ids, True
    if info.permutation is not None:  # positions are natural, the model's are hidden
        hidden = np.asarray(info.permutation)
        return tokens[hidden], given[hidden]
    return tokens, given


def _record(index: int, row: Samples, info: DataInfo, config) -> dict:
    s = config.sample
    record = {"id": index, "tokens": row.tokens.tolist(), "step": row.step.tolist()}
    record["text"] = info.text(row.tokens[: row.lengths])
    return record | {
        "order": s.order,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "params": s.params,
        "noise": "float32 Gumbel, full-resolution uniforms",
    }
