"""Checkpoints: the only module that imports orbax.

A checkpoint of step s is `workdir/checkpoints/s/` with two items: `state`, the arrays, and `meta`,
the JSON that says which run they belong to. A directory has its final name only when complete.
"""

import copy
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from aodiff import config as config_lib
from aodiff.config import ConfigError
from aodiff.state import TrainState

FORMAT = 1
# Keys, and groups of keys, that must agree: to continue a run, to use its model on the same or
# other data, to begin with its parameters.
IDENTITY = ("seed", "train.global_batch", "method.", "data.", "model.")
SHAPES = ("model.", "data.seq_len", "data.tokenizer", "data.vocab", "data.levels")
MODEL_IDENTITY = ("method.", "data.permute_seed", *SHAPES)
# (stored method, method of the new run) -> what `init_from` takes: place in the new state -> in the
# stored one. Others must be of one family and take the parameters.
STARTS = {
    ("mdm", "sas"): {"extra.denoiser": "params"},
    ("sas", "sas"): {"extra.denoiser": "extra.denoiser", "params": "params"},
    ("sas_denoiser", "sas"): {"extra.denoiser": "params", "params": "extra.policy"},
    ("sas", "sas_denoiser"): {"params": "extra.denoiser", "extra.policy": "params"},
    ("sas_denoiser", "sas_denoiser"): {"params": "params", "extra.policy": "extra.policy"},
    ("sas_denoiser", "mdm"): {"params": "params"},
    ("mdm", "flexmdm_retrofit"): {"params.params.base": "params.params"},
}
# What a method adds to the model it begins with, of which the stored run says nothing.
ADDED = {
    ("mdm", "flexmdm_retrofit"): ("model.anchor_id", "model.modulators", "model.classes"),
}
NEVER_FRESH = ("sas", "sas_denoiser")
# These do not change the function of a model.
FREE = ("data.dir", "model.remat", "model.attention", "checkpoint.allow_config_change")


class CheckpointError(Exception):
    """A checkpoint cannot be written or read: one sentence with the path and what to do."""


class _Manager(ocp.CheckpointManager):
    """orbax's manager, kept away from the preemption service.

    orbax asks the service about the step it is saving, also from its background thread. The service
    then takes that old step for the present one, and a SIGTERM in that moment is never acted upon.
    """

    def reached_preemption(self, step: int) -> bool:
        del step
        return False


class _LeafByLeaf(ocp.type_handlers.ArrayHandler):
    """Writes arrays that functions make, each made after the one before is on disk."""

    async def serialize(self, values, infos, args=None):
        for make, info, arg in zip(values, infos, args, strict=True):
            for future in await super().serialize([make()], [info], [arg]):
                future.result()
        return []


class Checkpoints:
    """The checkpoints of one run; saves are asynchronous."""

    def __init__(
        self,
        workdir: pathlib.Path,
        keep_last: int = 1,
        keep_every: int | None = None,
        read_only: bool = False,
    ):
        policy = ocp.checkpoint_managers
        policies = [policy.LatestN(keep_last)]
        if keep_every is not None:
            policies.append(policy.EveryNSteps(keep_every))
        self.path = pathlib.Path(workdir).resolve() / "checkpoints"
        try:
            self._manager = _Manager(
                self.path,
                options=ocp.CheckpointManagerOptions(
                    create=not read_only,
                    cleanup_tmp_directories=not read_only,
                    preservation_policy=policy.AnyPreservationPolicy(policies),
                ),
            )
        except OSError as e:
            raise _error("open", self.path, e) from e

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: dict) -> None:
        """Starts saving; returns when the arrays may be donated and `meta` may be changed."""
        # orbax writes the JSON later, in another thread.
        meta = copy.deepcopy(meta) | {"step": step}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        try:
            self._manager.save(step, args=items)
        except (OSError, ValueError, RuntimeError) as e:
            raise _error("write", self.path / str(step), e) from e

    def save_params(self, params: Any, meta: dict) -> None:
        """Writes step 0 with parameters alone, a tree of functions each of which makes one.

        They are called one after the other, so that no two need to be in memory.
        """
        registry = ocp.type_handlers.create_type_handler_registry(
            (types.FunctionType, _LeafByLeaf())
        )
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave({"params": params}),
            meta=ocp.args.JsonSave(meta | {"step": 0}),
        )
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        handlers = {"state": handler, "meta": ocp.JsonCheckpointHandler()}
        try:
            with _Manager(self.path, item_handlers=handlers, options=options) as manager:
                manager.save(0, args=items)
        except (OSError, RuntimeError) as e:
            raise _error("write", self.path / "0", e) from e
        self._manager.reload()

    def wait(self) -> None:
        """Blocks until every save is complete."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as e:
            raise _error("write", self.path, e) from e

    def meta(self, step: int) -> dict:
        """The JSON item of a checkpoint."""
        return self._restore(step, meta=ocp.args.JsonRestore())["meta"]

    def state(self, step: int, abstract: TrainState) -> TrainState:
        """The full state, on the shardings of `abstract`. Call it outside any mesh."""
        return self._restore(step, state=ocp.args.StandardRestore(abstract))["state"]

    def parts(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Parts of the state alone, by name, on the shardings of `abstract`, their shapes."""
        args = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        return self._restore(step, state=args)["state"]

    def part(self, step: int, path: str, abstract: Any) -> Any:
        """One part, which may lie deeper, such as "params" or "extra.denoiser"; see `parts`."""
        return _at(self.parts(step, _nested(path, abstract)), path)

    def array(self, step: int, path: str) -> np.ndarray:
        """One array of a part, such as "params.params.embedding", on the host, in its own dtype."""
        whole = ocp.RestoreArgs(restore_type=np.ndarray)
        args = ocp.args.PyTreeRestore(
            item=_nested(path, 0), restore_args=_nested(path, whole), partial_restore=True
        )
        return _at(self._restore(step, state=args)["state"], path)

    def dtypes(self, step: int, path: str) -> Any:
        """The tree of dtypes of a part as it is stored."""
        try:
            found = ocp.PyTreeCheckpointHandler().metadata(self.path / str(step) / "state").tree
        except (OSError, ValueError) as e:
            raise _error("read", self.path / str(step), e) from e
        return jax.tree.map(lambda x: np.dtype(x.dtype), _at(found, path))

    def _restore(self, step: int, **items) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as e:  # orbax and tensorstore raise many types for damaged files
            other = any(words in str(e) for words in ("do not match", "not compatible"))
            raise _error("fit" if other else "read", self.path / str(step), e) from e

    def close(self) -> None:
        """Waits for saves and ends the background threads."""
        self.wait()
        self._manager.close()


def _nested(path: str, value: Any) -> Any:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[name]
    return tree


def _with(tree: dict, path: str, value: Any) -> dict:
    """`tree` with another value at `path`."""
    name, _, rest = path.partition(".")
    return tree | {name: _with(tree[name], rest, value) if rest else value}


def _error(verb: str, path: pathlib.Path, e: Exception) -> CheckpointError:
    reason = " ".join(str(e).split())[:300]
    advice = {
        "open": "choose a directory you may write to with --workdir",
        "write": "free space or permissions, then rerun the same command; it continues from the "
        "newest complete checkpoint",
        "read": "delete that directory to continue from an older one, or use another --workdir",
        "fit": "it is of another model or optimizer; use the config it was written with",
    }[verb]
    reason = f"{type(e).__name__}: {reason}"
    return CheckpointError(f"cannot {verb} checkpoint {path} ({reason}); {advice}")


def make_meta(config, fingerprint: str, versions: dict[str, str]) -> dict:
    """The JSON item of every checkpoint of a run, without its step."""
    return {
        "format": FORMAT,
        "config": config.to_dict(),
        "fingerprint": fingerprint,
        "prng": "threefry2x32",
        "versions": versions,
    }


def check_same_run(
    stored: dict,
    config,
    fingerprint: str,
    where: pathlib.Path,
    identity: tuple[str, ...] = IDENTITY,
) -> dict[str, tuple]:
    """Returns the harmless differences between a stored run and `config`.

    Args:
      stored: `make_meta` of the stored run, through JSON.
      config: the present config.
      fingerprint: of the present training split.
      where: workdir of the stored run, for the message.
      identity: keys, and groups ending in a dot, that must agree.

    Raises:
      ConfigError: the data or one of `identity` differ, without `checkpoint.allow_config_change`.
    """
    name = stored["config"]["method"]["name"]
    known = name in config_lib.METHOD_DEFAULTS
    defaults = config_lib.flatten(config_lib.base(name)) if known else {}
    # A key that is younger than the stored run had its default value then.
    changed = config_lib.diff(defaults | config_lib.flatten(stored["config"]), config)
    for key in (*FREE, *ADDED.get((name, config.method.name), ())):
        changed.pop(key, None)
    if stored["fingerprint"] != fingerprint:
        changed["data fingerprint"] = (stored["fingerprint"], fingerprint)
    refused = {
        key: values
        for key, values in changed.items()
        if key in (*identity, "data fingerprint") or f"{key.split('.')[0]}." in identity
    }
    if refused and not config.checkpoint.allow_config_change:
        raise ConfigError(
            f"{where} holds a run with {_listed(refused, 0)}, but this command asks for "
            f"{_listed(refused, 1)}; use another --workdir, or "
            "--config.checkpoint.allow_config_change=True to continue it all the same"
        )
    return changed


def _listed(changes: dict[str, tuple], side: int) -> str:
    shown = [f"{k}={v[side]!r}" for k, v in list(changes.items())[:4]]
    return ", ".join(shown) + (", ..." if len(changes) > 4 else "")


def start_up(
    own: Checkpoints, config, abstract: TrainState, meta: dict, fresh: Callable[[], TrainState]
) -> tuple[TrainState, dict]:
    """Finds where a run starts: latest in its workdir, `resume_from`, `init_from`, or fresh.

    Args:
      own: checkpoints of the run's workdir.
      config: the present config.
      abstract: from `aodiff.state.abstract_state`.
      meta: from `make_meta`.
      fresh: makes the initial state.

    Returns:
      The state, and the meta item of the checkpoint it continues ({}: it does not continue any).

    Raises:
      ConfigError: the checkpoint belongs to another run, or the named directory holds none.
      CheckpointError: the checkpoint is damaged.
    """
    c = config.checkpoint
    if (step := own.latest()) is not None:
        logging.info("start: from step %d of this workdir", step)
        return _resume(own, step, config, abstract, meta)
    if c.resume_from is not None:
        other, step = existing(c.resume_from, "checkpoint.resume_from")
        logging.info("start: resume_from step %d of %s", step, c.resume_from)
        return _resume(other, step, config, abstract, meta)
    if c.init_from is not None:
        other, step = existing(c.init_from, "checkpoint.init_from")
        stored = other.meta(step)
        check_same_run(stored, config, stored["fingerprint"], other.path.parent, SHAPES)
        logging.info("start: parameters of step %d of %s", step, c.init_from)
        state = fresh()
        for place, origin in starts(stored["config"]["method"]["name"], config).items():
            group, _, path = place.partition(".")
            like, now = getattr(abstract, group), getattr(state, group)
            found = other.part(step, origin, _at(like, path) if path else like)
            state = state.replace(**{group: _with(now, path, found) if path else found})
        if state.ema_params is not None:
            state = state.replace(ema_params=jax.tree.map(jnp.copy, state.params))
        return state, {}
    if config.method.name in NEVER_FRESH:
        raise ConfigError(
            f"method.name={config.method.name!r} begins with a trained model; name the workdir of "
            "its run in checkpoint.init_from"
        )
    logging.info("start: fresh")
    return fresh(), {}


def starts(stored: str, config) -> dict[str, str]:
    """What a run of `config` takes from a run of the method `stored`; see `STARTS`.

    Raises:
      ConfigError: it cannot begin with such a run.
    """
    name = config.method.name
    found = STARTS.get((stored, name))
    if found is None and {stored, name} & set(NEVER_FRESH):
        raise ConfigError(
            f"checkpoint.init_from={str(config.checkpoint.init_from)!r} is a run of {stored}, with "
            f"which {name} cannot begin; name one of "
            f"{' or '.join(a for a, b in STARTS if b == name) or 'its own kind'}"
        )
    return found or {"params": "params"}


def existing(workdir: str | pathlib.Path, what: str) -> tuple[Checkpoints, int]:
    """The checkpoints of a workdir that must have some, and the newest step.

    Raises:
      ConfigError: there is none; `what` says which setting named the directory.
    """
    path = pathlib.Path(workdir)
    found = Checkpoints(path, read_only=True) if (path / "checkpoints").is_dir() else None
    step = found.latest() if found else None
    if step is None:
        raise ConfigError(
            f"{what}={str(workdir)!r} holds no checkpoint; name the workdir of a run that has "
            "saved one"
        )
    return found, step


def _resume(
    found: Checkpoints, step: int, config, abstract: TrainState, meta: dict
) -> tuple[TrainState, dict]:
    stored = found.meta(step)
    changed = check_same_run(stored, config, meta["fingerprint"], found.path.parent)
    for key, (old, new) in changed.items():
        logging.info("changed since the checkpoint: %s %r -> %r", key, old, new)
    return found.state(step, abstract), stored
