"""Sampling from a trained model to `samples/<step>.jsonl`, with a figure of the first sample."""

import json
import pathlib

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from aodiff import figures_samples, figures_trace, given_rows, rng
from aodiff.config import ConfigError
from aodiff.data import DataInfo
from aodiff.methods.base import Method, Samples
from aodiff.partitioning import shard


def make_draw(method: Method, config, mesh: Mesh, max_given: int) -> jax.stages.Wrapped:
    """The jitted fn(params, extra, ids (B,), tokens (B, L), given (B, L)) -> Samples.

    It takes one more argument where rows grow: bounds of holes (B, L, 2), see `GivenRows`.
    Call or lower it with `mesh` set.
    """
    sampler = method.sampler(config, max_given)

    def draw(params, extra, ids, tokens, given, *bounds) -> Samples:
        keys = rng.example_keys(rng.stream(config.seed, rng.SAMPLE), shard(ids, "batch"))
        tokens, given = (shard(x, "batch", None) for x in (tokens, given))
        bounds = (shard(x, "batch", None, None) for x in bounds)
        return sampler(params, extra, keys, tokens, given, *bounds)

    return jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec()))


def draw_rows(
    method: Method,
    params,
    extra,
    info: DataInfo,
    config,
    mesh: Mesh,
    tokens: np.ndarray,
    given: np.ndarray,
    bounds: np.ndarray | None = None,
) -> Samples:
    """Fills the positions that are not given as `config.sample` says, `sample.batch` rows a call.

    A row's randomness is keyed by its index, so it does not depend on `sample.batch` or the mesh.

    Args:
      tokens: (num, L) ids in natural order; entries that are not given are ignored.
      given: (num, L) bool. Given positions come first, the others follow in the order of the model.
      bounds: (num, L, 2) int32 of the holes in rows that grow, see `GivenRows`.

    Returns:
      Samples on the host, in natural order.
    """
    num, batch = len(tokens), config.sample.batch
    tokens, given = info.hidden(tokens.astype(np.int32)), info.hidden(given)
    columns = (tokens, given) if bounds is None else (tokens, given, bounds)
    fn = make_draw(method, config, mesh, int(given.sum(axis=1).max(initial=0)))
    parts = []
    for start in range(0, num, batch):
        ids = np.arange(start, start + batch, dtype=np.int32)
        rows = np.minimum(ids, num - 1)
        with jax.set_mesh(mesh):
            parts.append(jax.device_get(fn(params, extra, ids, *(x[rows] for x in columns))))
        logging.info("sampled %d of %d", min(start + batch, num), num)
    out = jax.tree.map(lambda *parts: np.concatenate(parts)[:num], *parts)
    by_position = {k: getattr(out, k) for k in ("tokens", "step", "logp")}
    return out.replace(**{k: x if x is None else info.natural(x) for k, x in by_position.items()})


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
    """Draws `sample.num` rows, or as many completions of each row of `sample.given`.

    Writes one JSON object per row, all positions natural, and returns the path of the file.

    A model of one order completes exactly if the given positions come first in that order;
    otherwise it is asked for an order it met in its any-order training at most, and completions
    follow the conditionals it has there.

    Raises:
      ConfigError, DataError: a prompt or a given row that does not fit.
    """
    s = config.sample
    if s.given is not None:
        if s.prompt or s.positions:
            raise ConfigError("sample.given and sample.prompt are both set; set one of them")
        mask = method.mask_id if getattr(method, "grows", False) else None
        start = given_rows.read(pathlib.Path(s.given), info, mask)
    else:
        tokens, given = place_prompt(s.prompt, s.positions, info)
        start = given_rows.GivenRows(tokens[None], given[None], ([],))
    source = np.repeat(np.arange(len(start.tokens)), s.num)  # the row that each sample completes
    given = start.given[source]
    bounds = None if start.bounds is None else start.bounds[source]
    out = draw_rows(method, params, extra, info, config, mesh, start.tokens[source], given, bounds)
    path = workdir / "samples" / f"{step}.jsonl"
    if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        records = []
        for i, row in enumerate(source.tolist()):
            content = given_rows.content(out.tokens[i], out.lengths[i], start.values[row], info)
            which = {"id": i} if s.given is None else {"id": i, "row": row}
            there = given[i]
            if out.born is not None:  # given tokens have moved
                live = np.arange(info.seq_len) < out.lengths[i]
                there = live & (out.born[i] < 0) & (out.step[i] < 0)
            when = {"given": np.flatnonzero(there).tolist(), "step": out.step[i].tolist()}
            if out.born is not None:
                when |= {"born": out.born[i].tolist(), "length": int(out.lengths[i])}
            records.append(which | content | when | _settings(config))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        figure = path.with_suffix(".png")
        values = records[0].get("values")
        if out.born is None:
            figures_samples.sample(figure, out.tokens[0], out.step[0], values, info)
        else:
            live = slice(0, out.lengths[0])
            pieces = [info.text(token[None]) for token in out.tokens[0, live]]
            figures_trace.trace(figure, pieces, out.step[0, live], out.born[0, live])
        logging.info("first sample: %s", info.text(info.hidden(out.tokens[0])[: out.lengths[0]]))
        logging.info("wrote %s and %s", path, figure)
    return path


def place_prompt(prompt: str, positions, info: DataInfo) -> tuple[np.ndarray, np.ndarray]:
    """Ids (L,) int32 and given (L,) bool of a prompt at natural `positions` (default 0, 1, ...)."""
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
    return tokens, given


def _settings(config) -> dict:
    s = config.sample
    return {
        "order": s.order,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "params": s.params,
        "noise": "float32 Gumbel, full-resolution uniforms",
    }
