"""CARVE: rows of masked diffusion that grow where they need to, against fixed canvases.

  python -m aodiff.main --config=configs/carve.py[:preset]

Trains a small denoiser on questions with answers of 1 to 52 digits, then answers held-out questions
on fixed canvases of several lengths, with always-accepted growth, with CARVE and with DAEDAL, each
with and without stopping at the end symbol. The table is printed last, canvas.png draws it.

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | sums, rows of 64 | 2 CPU cores | | |
| smoke | tiny model, rows of 24 | 2 CPU cores, 1 min | runs | |
"""

from aodiff.config import ConfigError, base

SUMS = {
    "data.name": "sums",
    "data.seq_len": 64,
    "data.eval_rows": 500,
    "data.train_rows": 500_000,
    "method.canvas": (0.3, 12),
    "model.num_layers": 4,
    "model.width": 64,
    "model.mlp": "gelu",
    "model.position": "rope",
    "model.kernel_std": 0.08,
    "optim.lr": 3e-3,
    "optim.weight_decay": 0.01,
    "optim.ema_decay": 0.99,
    "train.global_batch": 64,
    "train.num_steps": 1500,
    "checkpoint.every": 500,
    "log.every": 100,
    "eval.orders": ("own",),
    "eval.batch": 100,
    "eval.split": "test",
    "eval.measures": ("canvas",),
    "eval.samples": 500,
    "eval.canvases": (10, 18, 26, 42, 58),
    "sample.order": "confidence",
    "sample.eos": "last",
    "sample.crop": True,
    "sample.temperature": 0.0,
    "sample.canvas": (26, 58),
    "sample.grow": "carve",
    "sample.daedal.window": 8,
}
PRESETS = {
    "": SUMS,
    "smoke": SUMS
    | {
        "data.seq_len": 24,
        "data.eval_rows": 40,
        "model.num_layers": 1,
        "model.width": 32,
        "train.num_steps": 60,
        "checkpoint.every": 30,
        "eval.batch": 40,
        "eval.samples": 40,
        "eval.canvases": (9, 18),
        "sample.canvas": (9, 18),
        "sample.carve.growth": 5,
        "sample.carve.interval": 4,
        "sample.carve.window": 4,
    },
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("mdm")
    config.update_from_flattened_dict(PRESETS[preset])
    return config
