"""SAS: a policy learns in which order a masked diffusion model fills what is hidden.

  python -m aodiff.main --config=configs/sas.py[:preset]

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | Sudoku 4x4 | 2 CPU cores | | |
| misleading | Sudoku 4x4, a denoiser confidently wrong at 5 cells | 2 CPU cores | | |
| smoke | Sudoku 4x4, tiny | 2 CPU cores, 1 min | runs | run |
"""

from aodiff.config import ConfigError, base

SUDOKU4 = {
    "data.name": "sudoku4",
    "data.seq_len": 16,
    "data.clues": (4, 4),
    "data.train_rows": 1000,
    "data.eval_rows": 1000,
    "model.num_layers": 2,
    "model.width": 48,
    "model.position": "grid",
    "model.mlp": "gelu",
    "model.kernel_std": 0.1,
    "stages.denoiser.steps": 183,
    "stages.denoiser.batch": 128,
    "stages.denoiser.lr": 2e-3,
    "stages.second.steps": 150,
    "optim.lr": 3e-3,
    "optim.lr_floor": 3e-4,
    "optim.warmup_steps": 1,
    "optim.weight_decay": 0.0,
    "optim.ema_decay": 0.0,
    "train.global_batch": 16,
    "train.num_steps": 640,
    "checkpoint.every": 200,
    "log.every": 40,
    "eval.params": "raw",
    "eval.orders": ("own", "greedy", "any", "confidence", "margin", "entropy", "l2r"),
    "eval.batch": 100,
    "eval.split": "test",
    "eval.measures": ("sudoku",),
    "eval.decoders": ("random", "l2r", "entropy", "margin", "confidence", "own", "sampled"),
    "eval.samples": 1000,
    "sample.params": "raw",
    "sample.order": "own",
}
PRESETS = {
    "": SUDOKU4,
    "misleading": SUDOKU4
    | {
        "data.clues": (6, 6),
        "model.num_layers": 3,
        "model.width": 64,
        "method.policy_cells": True,
        "method.mislead": (0, 5, 7, 10, 13),
        "stages.denoiser.steps": 464,
        "stages.second.steps": 0,
        "train.num_steps": 480,
    },
    "smoke": SUDOKU4
    | {
        "data.eval_rows": 64,
        "stages.denoiser.steps": 40,
        "stages.second.steps": 10,
        "train.num_steps": 40,
        "eval.samples": 64,
        "eval.batch": 32,
    },
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("sas")
    config.update_from_flattened_dict(PRESETS[preset])
    return config
