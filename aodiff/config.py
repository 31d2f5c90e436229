"""The base config, its validation, and the one exception every bad value raises."""

import ml_collections
from ml_collections import config_dict


class ConfigError(Exception):
    """A bad configuration: one sentence with what came, what is allowed and what to do."""


METHOD_DEFAULTS = {
    "aogpt": dict(
        order="mix(0.1)",  # see aodiff/core/orders.py for every order distribution
    ),
    "ordergpt": dict(
        # Curriculum, as fractions of train.num_steps (ordergpt.md section 10).
        warmup=(0.05, 0.3),  # earliest and latest end of P0
        context_gain=0.2,  # P0 ends when 1 - nll / marginal entropy reaches this
        shift=(0.36, 0.64),  # P2: share of learned orders rises from 0 to 0.8
        settle=0.70,  # P3 ends: only the learned order from here on
        freeze_from=0.5,
        sampler="map",  # or "gumbel"
        # Evidence, graph, teacher and student.
        refresh_every=20,
        probe_decay=0.9,
        reciprocal="product",
        student="row",
        student_width=128,
        student_lr=3e-3,
        student_steps=10,
        profile="linear",
    ),
}


def base(method: str = "aogpt") -> ml_collections.ConfigDict:
    """The config every experiment starts from; a config file sets only what differs."""
    c = ml_collections.ConfigDict()
    c.seed = 0
    c.method = ml_collections.ConfigDict(dict(name=method, **METHOD_DEFAULTS[method]))
    c.model = ml_collections.ConfigDict(
        dict(
            injection="adaln",
            num_layers=4,
            width=128,
            num_heads=4,
            cond_dim=128,
            norm="rms",
            qk_norm=True,
            tied_head=False,
            num_sinks=1,
            dtype="float32",
            remat="none",
            attention="auto",
        )
    )
    c.data = ml_collections.ConfigDict(
        dict(
            name="pydoc_topics",
            dir=config_dict.placeholder(str),
            tokenizer="byte",
            seq_len=256,
            permute_seed=config_dict.placeholder(int),  # hide the unit order behind a permutation
            levels=8,  # gray levels of digits, quantile bins of a table's numeric columns
            # Generators (aodiff/data/synthetic.py).
            vocab=8,
            alpha=0.15,  # Dirichlet concentration of transition rows
            noise=0.3,  # probability that a unit ignores its parent
            law_seed=0,
            train_rows=1_048_576,
            eval_rows=1024,
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
            params="ema",  # or "raw"
            orders=("l2r", "any"),
            num_orders=4,  # for "any"
            ensemble=0,  # members of the context-order ensemble; 0: off
            ensemble_steps=32,
            marginal=0,  # orders of the order-marginal bound; 0: off
        )
    )
    c.sample = ml_collections.ConfigDict(
        dict(
            num=8,
            batch=8,
            steps=0,  # network calls; 0: one per token
            schedule="linear",  # or "cosine"
            order="uniform",
            temperature=1.0,
            top_p=1.0,
            params="ema",
            prompt="",  # text to keep; the model writes the rest
            positions=(),  # where the prompt's tokens stand; (): from 0 on
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
            allow_config_change=False,
        )
    )
    c.log = ml_collections.ConfigDict(dict(every=20, tensorboard=False, wandb=False))
    c.compare = (
        ml_collections.ConfigDict()
    )  # arm name -> order of an AO-GPT trained with equal compute
    return c
