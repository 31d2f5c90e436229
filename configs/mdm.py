"""Masked diffusion: a bidirectional model that fills hidden positions in any order.

  python -m aodiff.main --config=configs/mdm.py[:preset]
  python -m aodiff.main --config=configs/mdm.py[:preset] --mode=eval | --mode=sample

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | English text that ships with Python, bytes, rows of 64 | 2 CPU cores | bound and left-to-right likelihood | started, not run to its end |
| smoke | hidden chain of 8 units, tiny model | 2 CPU cores, 1 min | runs | run |
"""

from aodiff.config import ConfigError, base

TEXT = {
    "data.seq_len": 64,
    "model.num_layers": 3,
    "model.width": 128,
    "model.position": "rope",
    "model.kernel_std": 0.08,
    "optim.lr": 3e-3,
    "optim.lr_floor": 3e-4,
    "optim.ema_decay": 0.99,
    "train.global_batch": 32,
    "train.num_steps": 1000,
    "eval.orders": ("any", "l2r"),
    "eval.batch": 64,
    "sample.order": "confidence",
    "sample.temperature": 0.7,
}
PRESETS = {
    "": TEXT,
    "smoke": TEXT
    | {
        "data.name": "chain",
        "data.seq_len": 8,
        "data.permute_seed": 1,
        "data.eval_rows": 256,
        "model.num_layers": 1,
        "model.width": 32,
        "model.position": "learned",
        "train.num_steps": 120,
        "checkpoint.every": 40,
    },
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("mdm")
    config.update_from_flattened_dict(PRESETS[preset])
    return config
