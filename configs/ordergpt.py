"""OrderGPT: one training run learns a generation order from attention and then trains in it.

  python -m aodiff.main --config=configs/ordergpt.py[:preset]
  python -m aodiff.main --config=configs/ordergpt.py[:preset] --mode=eval | --mode=sample

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | a medical table of 31 columns whose order is hidden, beside its file order, a random fixed order, any order and the learned order from scratch at equal compute | 2 CPU cores, 2 min | README | run |
| digits | 8x8 digits with hidden pixel positions, beside the same | 2 CPU cores, 4 min | README: better than any order, not than fixed orders | run |
| chain | hidden Markov chain of 24 units with known entropy 1.1278, beside its true order | 2 CPU cores, 3 min | own order within 0.03 nats of the true one | run |
| smoke | hidden chain of 8 units, tiny model | 2 CPU cores, 1 min | runs | run |
"""

from aodiff.config import ConfigError, base

SMALL = {  # what every preset here has in common
    "model.injection": "input",
    "model.kernel_std": 0.08,
    "optim.lr": 3e-3,
    "optim.lr_floor": 3e-4,
    "eval.batch": 128,
    "eval.orders": ("own", "any"),
    "sample.order": "own",
}
TABLE = SMALL | {
    "data.name": "breast_cancer",
    "data.seq_len": 31,
    "data.levels": 5,
    "data.permute_seed": 1,
    "model.num_layers": 2,
    "model.width": 32,
    "method.probe_orders": 8,
    "method.refresh_every": 10,
    "method.student_steps": 50,
    "optim.ema_decay": 0.99,
    "optim.weight_decay": 0.3,
    "train.num_steps": 400,
}
CHAIN = SMALL | {
    "data.name": "chain",
    "data.seq_len": 24,
    "data.permute_seed": 10,
    "model.num_layers": 3,
    "model.width": 64,
    "train.global_batch": 64,
    "train.num_steps": 800,
}
PRESETS = {
    "": TABLE,
    "digits": TABLE
    | {
        "data.name": "digits",
        "data.seq_len": 64,
        "data.levels": 3,
        "model.width": 48,
        "method.probe_orders": 2,
        "train.num_steps": 600,
    },
    "chain": CHAIN,
    "smoke": CHAIN
    | {
        "data.seq_len": 8,
        "model.num_layers": 1,
        "model.width": 32,
        "train.num_steps": 120,
        "data.eval_rows": 256,
        "checkpoint.every": 40,
    },
}
COMPARE = {
    "file_order": "native",
    "fixed": "fixed(1)",
    "any_order": "uniform",
    "scratch": "learned",
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("ordergpt")
    config.update_from_flattened_dict(PRESETS[preset])
    if preset != "smoke":
        config.compare = COMPARE
    return config
