"""The base config, its validation, and the one exception every bad value raises."""

import copy
import difflib
import json
import math
import pathlib
from collections.abc import Mapping

import ml_collections
from ml_collections import config_dict

from aodiff.method_defaults import METHOD_DEFAULTS, MODEL_DEFAULTS, SAMPLE_DEFAULTS, STAGES


class ConfigError(Exception):
    """A bad configuration: one sentence with what came, what is allowed and what to do."""


LEARNED = "learned"  # in config.compare: the order the main run learned, from scratch
# Orders of config.compare that are found first: by the main run, or from the training rows alone.
FOUND = (LEARNED, "mi_fiedler", "greedy_entropy")

MDM = "mdm"  # in config.compare: a masked diffusion model


def base(method: str = "aogpt") -> ml_collections.ConfigDict:
    """The config every experiment starts from; a config file sets only what differs."""
    c = ml_collections.ConfigDict()
    c.seed = 0
    c.method = ml_collections.ConfigDict(dict(name=method, **METHOD_DEFAULTS[method]))
    c.model = ml_collections.ConfigDict(
        dict(
            num_layers=4,
            width=128,
            num_heads=4,
            qk_norm=True,
            tied_head=False,
            dtype="float32",
            remat="none",
            attention="auto",
            kernel_std=0.02,  # of projections at the start; narrow models learn faster with more
            **copy.deepcopy(MODEL_DEFAULTS[method]),  # placeholders are shared otherwise
        )
    )
    c.data = ml_collections.ConfigDict(
        dict(
            name="pydoc_topics",
            dir=config_dict.placeholder(str),
            tokenizer="byte",
            seq_len=256,
            # Hides the unit order behind a permutation; -1: another one for every `seed`.
            permute_seed=config_dict.placeholder(int),
            levels=8,  # gray levels of digits, quantile bins of a table's numeric columns
            # Generators (aodiff/data/synthetic.py).
            vocab=8,
            alpha=0.15,  # Dirichlet concentration of transition rows
            noise=0.3,  # probability that a unit ignores its parent; of angles: radians
            law_seed=0,  # -1: another law for every `seed`
            lengths=(),  # of bracket strings: four even ones; (): 1/16, 1/4, 1/2, 1 of seq_len
            train_rows=1_048_576,
            eval_rows=1024,
            # Puzzles: lowest and highest number of given cells, (): whole grids; and whether their
            # solution must be the only one. Of mazes: of subgoals.
            clues=(),
            unique=False,
            maze=(9, 0.25),  # cells of its side, share of its walls that is opened
        )
    )
    c.optim = ml_collections.ConfigDict(
        dict(
            lr=1e-3,
            lr_floor=1e-4,
            warmup_steps=50,
            decay_steps=config_dict.placeholder(int),  # None: train.num_steps
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=0.05,
            clip_global_norm=1.0,
            ema_decay=0.999,  # 0: no EMA
            max_nonfinite=5,
        )
    )
    c.train = ml_collections.ConfigDict(dict(global_batch=32, num_steps=500, microbatches=1))
    c.eval = ml_collections.ConfigDict(
        dict(
            every=0,  # steps; 0: only at the end
            batch=32,
            split="validation",
            # Another split, scored with it and reported at the step at which own is best on it.
            report_split=config_dict.placeholder(str),
            params="ema",  # or "raw"
            orders=("l2r", "any"),
            num_orders=4,  # for "any"
            ensemble=0,  # members of the context-order ensemble; 0: off
            ensemble_steps=32,
            marginal=0,  # orders of the order-marginal bound; 0: off
            measures=(),  # what else to measure of the trained model, see aodiff/evals
            samples=512,  # rows drawn for those measures
            decoders=(),  # values of sample.order that "sudoku" compares; (): sample.order
            steps=(),  # numbers of calls that "brackets" and "maze" compare; (): sample.steps
            canvases=(),  # positions to write on the fixed canvases that "canvas" compares
        )
    )
    c.sample = ml_collections.ConfigDict(
        dict(
            num=8,  # rows, or completions of each row of `given`
            batch=8,
            steps=0,  # network calls; 0: one per token
            # How many at a time: or "cosine"; of masked diffusion also "threshold(0.9)",
            # "factor(1)", "one", "dllm", "dream", "ancestral" (aodiff/sampling/policies.py).
            schedule="linear",
            # Masked diffusion: also "confidence", "max_prob", "margin", "entropy", "random".
            order="uniform",
            temperature=1.0,
            top_p=1.0,
            # Of masked diffusion alone.
            top_k=0,  # most likely ids that may be drawn, after top_p; 0: all
            block=0,  # positions are revealed block by block, also where rows grow; 0: no blocks
            # With blocks: calls between two of a whole row, which compute the block alone and see
            # the rest in a cache (Fast-dLLM); 1 is exact, 0: no cache.
            refresh=0,
            buckets=(),  # widths at which steps are compiled too, for rows that are still short
            position_noise=0.0,  # temperature of the choice of positions; 0: the best
            remask="",  # or "topk", "p2": unlikely tokens are masked again in every step
            eos="free",  # or "last", "never": when the id that ends a text may be revealed
            crop=False,  # a row ends where it writes that id; what is masked before is filled
            canvas=(),  # (positions to write at first, at most); (): all of a row
            grow="none",  # or "carve", "daedal": how rows get from the first to the second
            carve=dict(growth=16, interval=16, window=8, tau=0.02, decided=False),
            daedal=dict(growth=8, window=32, enough=0.5, sure=0.9, unsure=0.1),
            params="ema",
            prompt="",  # text to keep; the model writes the rest
            positions=(),  # where the prompt's tokens stand; (): from 0 on
            given=config_dict.placeholder(str),  # JSON lines, rows with null where to write
            **SAMPLE_DEFAULTS.get(method, {}),
        )
    )
    c.mesh = ml_collections.ConfigDict(dict(data=1, fsdp=-1, model=1))
    c.checkpoint = ml_collections.ConfigDict(
        dict(
            every=100,
            keep_last=2,
            keep_every=config_dict.placeholder(int),
            resume_from=config_dict.placeholder(str),
            init_from=config_dict.placeholder(str),
            needs="",  # weights, in words, without which nothing is worth doing; see init_from
            allow_config_change=False,
        )
    )
    c.log = ml_collections.ConfigDict(dict(every=20, tensorboard=False, wandb=False))
    # Arm name -> order of an AO-GPT trained with equal compute.
    c.compare = ml_collections.ConfigDict()
    # The config and its arms once per seed and hidden permutation; (): once, as it stands.
    c.study = ml_collections.ConfigDict(dict(seeds=(), permute_seeds=()))
    c.stages = ml_collections.ConfigDict(STAGES.get(method, {}))
    # Measure -> (lowest, highest) that passes, and the share of runs that must pass.
    c.criteria = ml_collections.ConfigDict()
    return c


POSITIVE = (
    "model.num_layers model.width model.num_heads data.seq_len optim.lr optim.eps "
    "optim.max_nonfinite optim.clip_global_norm train.global_batch train.num_steps "
    "train.microbatches eval.batch eval.num_orders eval.ensemble_steps "
    "model.kernel_std sample.num sample.batch checkpoint.every checkpoint.keep_last log.every"
).split()
NOT_NEGATIVE = (
    "optim.lr_floor optim.warmup_steps optim.weight_decay eval.every eval.ensemble eval.marginal "
    "sample.steps sample.temperature sample.top_k sample.position_noise sample.refresh"
).split()
CHOICES = {
    "model.dtype": ("float32", "bfloat16"),
    "eval.params": ("ema", "raw"),
    "sample.params": ("ema", "raw"),
    "sample.eos": ("free", "last", "never"),
}


def finalize(config: ml_collections.ConfigDict) -> ml_collections.FrozenConfigDict:
    """Validates `config`, fills in derived values and freezes a copy of it.

    Checks that need devices or data are made where those are known: `check_batches`,
    `aodiff.methods.build` and `aodiff.data.open_splits`.

    Raises:
      ConfigError: unknown method or key, or a value out of range.
    """
    c = ml_collections.ConfigDict(config).copy_and_resolve_references()
    name = c.get("method", {}).get("name")
    if name not in METHOD_DEFAULTS:
        raise ConfigError(
            f"method.name={name!r} is not a method; choose one of {', '.join(METHOD_DEFAULTS)}"
        )
    _check_keys(flatten(c), flatten(base(name)))
    values = flatten(c)
    if not 0 <= c.seed < 2**32:
        raise ConfigError(f"seed={c.seed} is not in 0 .. 4294967295; choose one that is")
    optional = ("optim.decay_steps", "checkpoint.keep_every", "model.mlp_dim", "model.cond_dim")
    for key in (*POSITIVE, *(key for key in optional if values.get(key) is not None)):
        if not 0 < values[key] < math.inf:
            raise ConfigError(f"{key}={values[key]} must be positive; raise it")
    for key in NOT_NEGATIVE:
        if not 0 <= values[key] < math.inf:
            raise ConfigError(f"{key}={values[key]} must not be negative; use 0 or more")
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            raise ConfigError(f"{key}={values[key]!r} is unknown; use one of {', '.join(allowed)}")
    for key in ("optim.ema_decay", "optim.b1", "optim.b2"):
        if not 0 <= values[key] < 1:
            raise ConfigError(f"{key}={values[key]} is not in [0, 1); choose a value below 1")
    if not 0 < c.sample.top_p <= 1:
        raise ConfigError(f"sample.top_p={c.sample.top_p} is not in (0, 1]; 1 keeps every token")
    if c.train.global_batch % c.train.microbatches:
        raise ConfigError(
            f"train.global_batch={c.train.global_batch} does not split into "
            f"train.microbatches={c.train.microbatches}; choose a multiple"
        )
    if c.optim.ema_decay == 0 and "ema" in (c.eval.params, c.sample.params):
        raise ConfigError(
            "optim.ema_decay=0 keeps no EMA parameters, but eval.params or sample.params asks for "
            "them; set both to raw"
        )
    if not (c.eval.orders or c.eval.ensemble or c.eval.marginal):
        raise ConfigError(
            "eval.orders=() without eval.ensemble or eval.marginal leaves nothing to evaluate; set "
            "eval.orders, for example to ('any',)"
        )
    if c.checkpoint.needs and c.checkpoint.init_from is None:
        raise ConfigError(
            f"this config begins with {c.checkpoint.needs}, which do not come with the library; "
            "name the workdir of a run that holds them in checkpoint.init_from"
        )
    _check_study(c)
    if c.optim.decay_steps is None:
        c.optim.decay_steps = c.train.num_steps
    for key in ("permute_seed", "law_seed"):
        if c.data[key] == -1:
            c.data[key] = c.seed
    return ml_collections.FrozenConfigDict(c)


def _check_study(c) -> None:
    """Raises ConfigError for a bad value of eval.report_split, compare, study or criteria."""
    e = c.eval
    if e.report_split is not None and ("own" not in e.orders or e.report_split == e.split):
        raise ConfigError(
            f"eval.report_split={e.report_split!r} needs own in eval.orders and another eval.split "
            "to choose the step by; set both, or report_split to None"
        )
    for key, values in c.study.items():
        whole = all(type(v) is int and 0 <= v < 2**32 for v in values)
        if len(set(values)) < len(values) or not whole:
            raise ConfigError(
                f"study.{key}={values} must be distinct whole numbers of 0 .. 4294967295; "
                "correct them"
            )
    for name, rule in c.criteria.items():
        numbers = isinstance(rule, tuple | list) and all(isinstance(x, int | float) for x in rule)
        if not (numbers and len(rule) == 3 and rule[0] <= rule[1] and 0 <= rule[2] <= 1):
            raise ConfigError(
                f"criteria[{name!r}]={rule} is not (lowest, highest, share of runs that must "
                "pass); give three numbers, lowest first and the share in [0, 1]"
            )
    if (c.compare or c.criteria or any(c.study.values())) and "own" not in e.orders:
        raise ConfigError(
            f"eval.orders={e.orders} lacks own, by which compare, study and criteria judge a run; "
            "add own to eval.orders or empty those"
        )
    if LEARNED in c.compare.values() and c.method.name != "ordergpt":
        raise ConfigError(
            f"compare asks for the order that {c.method.name} learned, which learns none; drop it"
        )


def scored_splits(config) -> tuple[str, ...]:
    """The splits that every evaluation in training scores."""
    return (config.eval.split, *filter(None, [config.eval.report_split]))


def editable(config) -> ml_collections.ConfigDict:
    """An unlocked copy of a config, final or not."""
    return ml_collections.ConfigDict(config).copy_and_resolve_references().unlock()


def on_split(config, split: str) -> ml_collections.FrozenConfigDict:
    """A copy of a final config that evaluates another split."""
    c = ml_collections.ConfigDict(config).copy_and_resolve_references()
    c.eval.split = split
    return ml_collections.FrozenConfigDict(c)


def check_batches(config, rows: int) -> None:
    """Raises ConfigError unless every batch splits evenly over the mesh.

    Args:
      config: the config.
      rows: number of parts the mesh cuts a batch into (size of data times size of fsdp).
    """
    for key, batch in {
        "train.global_batch / train.microbatches": config.train.global_batch
        // config.train.microbatches,
        "eval.batch": config.eval.batch,
        "sample.batch": config.sample.batch,
    }.items():
        if batch % rows:
            raise ConfigError(
                f"{key} = {batch} does not divide over the {rows} batch shards "
                f"(mesh.data x mesh.fsdp); use a multiple of {rows} or a smaller mesh"
            )


def default_workdir(config_file: str) -> pathlib.Path:
    """configs/aogpt.py:smoke -> runs/aogpt-smoke; no time stamp, so that the same command resumes.

    Raises:
      ConfigError: the file does not exist.
    """
    path, _, preset = config_file.partition(":")
    if not pathlib.Path(path).is_file():
        raise ConfigError(f"--config={config_file}: no file {path}; name a file of configs/")
    return pathlib.Path("runs") / "-".join([pathlib.Path(path).stem, *filter(None, [preset])])


def flatten(config: Mapping, prefix: str = "") -> dict:
    """Returns {"group.key": value}, lists as tuples; an empty group has no entry."""
    out = {}
    for key, value in config.items():
        if isinstance(value, Mapping | ml_collections.ConfigDict):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = _tuples(value)
    return out


def diff(old: Mapping, new: Mapping) -> dict[str, tuple]:
    """Returns {"group.key": (old value, new value)} of what differs; an absent key reads None."""
    old, new = flatten(old), flatten(new)
    keys = list(old) + [k for k in new if k not in old]
    return {k: (old.get(k), new.get(k)) for k in keys if old.get(k) != new.get(k)}


def to_json(config) -> str:
    """The config as indented JSON."""
    return json.dumps(config.to_dict(), indent=1)


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _check_keys(given: dict, allowed: dict) -> None:
    for key in given:
        if key not in allowed and not key.startswith(("compare.", "criteria.")):
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]}" if near else "see base() in aodiff/config.py"
            raise ConfigError(f"config key {key} is unknown; {hint}?")
    missing = [key for key in allowed if key not in given]
    if missing:
        raise ConfigError(f"config key {missing[0]} is missing; start from aodiff.config.base()")
