"""A SAS run from nothing: its denoiser, its policy, the second stage and the control of that.

Each stage is a run of its own in a folder of the workdir, the policy's in the workdir itself; each
continues where it stands, and a finished one is left alone.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import logging

from aodiff import checkpoint, train
from aodiff.config import ConfigError, base, editable, finalize

DENOISER, SECOND, CONTROL = "denoiser", "second_stage", "control"


def has_stages(config) -> bool:
    """Whether the run of `config` trains other models too."""
    return bool(config.stages)


def run(config, workdir: pathlib.Path, profile: tuple[int, int] = (0, 0)) -> None:
    """Trains all stages of `config`.

    Args:
      profile: the steps to trace of the policy's run.

    Raises:
      ConfigError: a stage has a bad value, or began with another run than it would now.
    """
    runs = configs(config, workdir)
    # A bad value is refused before the first run.
    setups = {path: train.set_up(c) for path, c in runs.items()}
    for path, c in runs.items():
        logging.info("stage %s in %s", c.method.name, path)
        check_origin(setups[path], path)
        train.train(c, path, profile=profile if path == workdir else (0, 0))


def configs(config, workdir: pathlib.Path) -> dict[pathlib.Path, ml_collections.ConfigDict]:
    """The runs of all stages in order, by directory.

    Raises:
      ConfigError: a bad value, or nothing to begin with.
    """
    finalize(config)
    if config.checkpoint.resume_from is not None:
        raise ConfigError(
            "checkpoint.resume_from is for single runs, and this config has stages; name a trained "
            "denoiser in checkpoint.init_from, or continue with the same --workdir"
        )
    found, policy = {}, editable(config)
    if policy.checkpoint.init_from is None:
        if policy.stages.denoiser.steps < 1:
            raise ConfigError(
                "stages.denoiser.steps=0 trains no denoiser; raise it, or name a trained one in "
                "checkpoint.init_from"
            )
        found[workdir / DENOISER] = denoiser(config)
        policy.checkpoint.init_from = str(workdir / DENOISER)
    found[workdir] = policy
    if config.stages.second.steps:
        found[workdir / SECOND] = second(config, workdir, config.stages.second.random)
        found[workdir / CONTROL] = second(config, workdir, 1.0)
    return found


def member(config, workdir: pathlib.Path) -> ml_collections.ConfigDict:
    """The config of the run in `workdir`: a folder of one of the stages, or the policy's."""
    if not has_stages(config):
        return config
    return configs(config, workdir.parent).get(workdir, config)


def denoiser(config) -> ml_collections.ConfigDict:
    """The run that trains the denoiser, on whole rows where the policy gets clues."""
    c, s = _derived(config, "mdm"), config.stages.denoiser
    c.data.clues = ()
    c.train.update(num_steps=s.steps, global_batch=s.batch)
    c.optim.update(lr=s.lr, lr_floor=s.lr / 10, warmup_steps=min(50, s.steps // 10))
    c.eval.update(orders=("any",), measures=(), decoders=(), every=0, report_split=None)
    return c


def second(config, workdir: pathlib.Path, random: float) -> ml_collections.ConfigDict:
    """The run that goes on with the denoiser, on trajectories or on random masks."""
    c, s = _derived(config, "sas_denoiser"), config.stages.second
    c.method.update({key: config.method[key] for key in c.method if key in config.method})
    c.method.update(name="sas_denoiser", random=random, scope=s.scope)
    c.train.update(num_steps=s.steps, global_batch=s.batch)
    c.optim.update(lr=s.lr, lr_floor=s.lr / 10, warmup_steps=s.steps // 10, weight_decay=0.0)
    c.eval.update(every=0, report_split=None)
    c.eval.split = config.eval.report_split or config.eval.split
    c.checkpoint.init_from = str(workdir)
    return c


def _derived(config, method: str) -> ml_collections.ConfigDict:
    """The base config of another method with what it shares with `config`."""
    c = base(method)
    c.seed = config.seed
    for group in ("model", "data", "eval", "sample", "mesh", "checkpoint", "log"):
        c[group].update(editable(config)[group])
    c.optim.ema_decay = 0.0  # stages hand on the parameters themselves
    c.eval.params = c.sample.params = "raw"
    return c


def check_origin(setup: train.Setup, workdir: pathlib.Path) -> None:
    """Raises ConfigError if what is frozen in the run in `workdir`, the denoiser of a policy or the
    policy of a second stage, is not that of the run that its config begins with."""
    named = setup.config.checkpoint.init_from
    if named is None or not (workdir / "checkpoints").is_dir():
        return
    own = checkpoint.Checkpoints(workdir, read_only=True)
    if (step := own.latest()) is None:
        return
    other, last = checkpoint.existing(named, "checkpoint.init_from")
    origin = checkpoint.starts(other.meta(last)["config"]["method"]["name"], setup.config)
    frozen = setup.abstract.extra
    same = jax.jit(lambda a, b: jnp.all(jnp.array(jax.tree.leaves(jax.tree.map(_equal, a, b)))))
    for name in [place.partition(".")[2] for place in origin if place.startswith("extra.")]:
        ours = own.part(step, f"extra.{name}", frozen[name])
        theirs = other.part(last, origin[f"extra.{name}"], frozen[name])
        if not same(ours, theirs):
            raise ConfigError(
                f"{workdir} holds a run for another {name} than that of {named}; name the one it "
                "began with in checkpoint.init_from, or use another --workdir"
            )


def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.array_equal(a, b)


# ---- what the stages found -----------------------------------------------------------------------


def table(config, workdir: pathlib.Path) -> str:
    """The share of puzzles that the stages solve with each decoder, "" without measure "sudoku".

    Differences are paired by puzzle, each with its standard error.
    """
    paths = {p.name if p != workdir else "policy": p for p in configs(config, workdir)}
    paths = {name: p for name, p in paths.items() if name != DENOISER}
    solved = {name: _solved(p) for name, p in paths.items()}
    if not all(solved.values()):
        return ""
    decoders = [d for d in solved["policy"] if all(d in other for other in solved.values())]
    if not decoders or len({len(s[d]) for s in solved.values() for d in decoders}) > 1:
        return "\nthe stages were measured on different puzzles or with different decoders"
    puzzles = len(solved["policy"][decoders[0]])
    lines = [
        f"share of {puzzles} puzzles solved, in per cent +- standard error",
        f"{'decoder':<12}" + "".join(f"{name:>18}" for name in solved),
    ]
    for decoder in decoders:
        cells = [_percent(outcomes[decoder]) for outcomes in solved.values()]
        lines.append(f"{decoder:<12}" + "".join(f"{cell:>18}" for cell in cells))
    plain = [d for d in decoders if d not in ("own", "sampled")]
    if "own" in decoders and plain:
        best = max(plain, key=lambda d: np.mean(solved["policy"][d]))
        gain = solved["policy"]["own"] - solved["policy"][best]
        lines += ["", f"policy - {best}, the best other decoder: {_percent(gain, '+')}"]
    if SECOND in solved:
        for decoder in decoders:
            gain = solved[SECOND][decoder] - solved[CONTROL][decoder]
            lines.append(f"{SECOND} - {CONTROL}, decoder {decoder}: {_percent(gain, '+')}")
    return "\n".join(["", *lines])


def _solved(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """0 or 1 of each puzzle by decoder, {} where the run measured none."""
    path = workdir / "sudoku.json"
    if not path.exists():
        return {}
    return {k: np.array(v, float) for k, v in json.loads(path.read_text())["valid"].items()}


def _percent(values: np.ndarray, sign: str = "") -> str:
    error = values.std(ddof=1) / math.sqrt(len(values))
    return f"{100 * values.mean():{sign}.1f} +- {100 * error:.1f}"
