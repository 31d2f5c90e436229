"""SAS: a policy learns in which order a masked diffusion model fills what is hidden.

  python -m aodiff.main --config=configs/sas.py[:preset]
  python -m aodiff.main --config=configs/sas.py[:preset] --mode=eval | --mode=sample

One command trains the denoiser (or begins with a trained one, --config.checkpoint.init_from=RUN),
the policy on it, and from both the second stage and its control of as many random masks. Their
folders are those of the workdir: denoiser, second_stage, control.

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | Sudoku 4x4 with 4 random clues, a small denoiser | 1 CPU core, 5 min | see below | run |
| misleading | Sudoku 4x4 with 6 clues, a denoiser confidently wrong at 5 cells | 1 CPU core, 3 min | solved: confidence 2.7 +- 0.3 %, random 6.6 +- 0.4 %, policy 91.2 +- 0.4 %, sampled 90.7 +- 0.5 % | run |
| smoke | Sudoku 4x4, tiny | 1 CPU core, 2 min | runs | run |
| sudoku9 | Sudoku 9x9, denoiser of 7 M parameters | 1 accelerator; 5e16 FLOP for the denoiser, 5e16 for the policy | | not run |
| sudoku_1b | Sudoku 9x9 of a file, denoiser of 1.1 B parameters | 8 chips of 32 GB | published: 82.0 % by confidence, 91.8 % by the policy, 97.5 % after the second stage | not run |
| llada_8b_gsm8k | LLaDA-8B-Instruct on grade-school mathematics, 512 positions at once | 16 chips of 32 GB; 3e17 FLOP per 64 trajectories | published: pass@1 64 % by confidence, 76 % by the policy | not run |
| llada_8b_mbpp | the same on short programs | same | published: pass@1 39.5 %, 41 % | not run |

The presets of 1 and 8 billion parameters need weights and say so. Prompts need data with
`prompt_len`. sudoku9 may begin with a run of configs/mdm.py:sudoku_6m, which is the same model.

(none), per cent of 4000 puzzles of 36 unseen grids that are solved, any valid solution:

                  random    l2r  entropy  margin  confidence  policy  policy, sampled
  denoiser          60.4   70.1     99.1    95.5        95.7    99.9            100.0
  second stage      50.6   66.9     99.8    98.3        99.2    99.6             99.6
  its control       62.6   69.9     98.9    95.5        95.7   100.0            100.0

Standard errors are 0.8 at 60 %, 0.3 at 95.5 %, 0.1 near 100 %. Paired by puzzle, the policy solves
0.8 +- 0.2 more than the best heuristic (entropy), or 0.6 where a compiler rounds otherwise. Seeds 1,
2 and 3 have -0.2 +- 0.2, 0.0 +- 0.2 and 0.1 +- 0.2: over denoisers it is 0.2 +- 0.2 above entropy,
a tie, 3.2 +- 0.4 above margin and 2.9 +- 0.4 above confidence. What it is trained for, the nats of
the stated solution per cell, is 0.121 against 0.144 (entropy), 0.150 (confidence) and 0.215
(random). With 100 steps of denoiser and unique solutions (data.unique) it is 0.0 +- 0.2 and
0.5 +- 0.2 above the best heuristic; with 80 steps and random clues, where many solutions count and
one is taught, it is 12 +- 1 below (73 against 85 by margin) at the best likelihood of all. The
second stage helps orders it has seen (confidence 3.5 +- 0.3 above the control) and hurts the others
(random 11.9 +- 0.9 below); in the policy's own order it is 0.4 +- 0.1 below the control.

On 9x9 (denoiser of 0.2 M parameters, 2500 steps; 500 puzzles of one solution with 28 to 31 clues) a
policy of 80 iterations reaches 69.4 +- 2.1 %, margin 74.2 +- 2.0 %: it does not win there.
"""

from aodiff.config import ConfigError, base
from aodiff.pretrained import LLADA

HEURISTICS = ("random", "l2r", "entropy", "margin", "confidence")
POLICY = {
    "optim.lr": 3e-3,
    "optim.lr_floor": 3e-4,
    "optim.warmup_steps": 1,
    "optim.weight_decay": 0.0,
    "optim.ema_decay": 0.0,
    "eval.params": "raw",
    "sample.params": "raw",
    "sample.order": "own",
    "sample.temperature": 0.0,
}
SUDOKU4 = POLICY | {
    "data.name": "sudoku4",
    "data.seq_len": 16,
    "data.clues": (4, 4),
    "data.train_rows": 1000,
    "data.eval_rows": 4000,
    "model.num_layers": 2,
    "model.width": 48,
    "model.position": "grid",
    "model.mlp": "gelu",
    "model.kernel_std": 0.1,
    "stages.denoiser.steps": 183,
    "stages.denoiser.batch": 128,
    "stages.denoiser.lr": 2e-3,
    "stages.second.steps": 150,
    "train.global_batch": 32,
    "train.num_steps": 1200,
    "method.advantage": "reward_to_go",
    "checkpoint.every": 400,
    "log.every": 80,
    "eval.orders": ("own", "greedy", "any", "confidence", "entropy"),
    "eval.batch": 400,
    "eval.split": "test",
    "eval.measures": ("sudoku",),
    "eval.decoders": (*HEURISTICS, "own", "sampled"),
    "eval.samples": 4000,
}
SUDOKU9 = {  # the data and the model of configs/mdm.py:sudoku_6m
    "data.name": "sudoku",
    "data.seq_len": 81,
    "data.train_rows": 1_048_576,
    "model.num_layers": 4,
    "model.width": 384,
    "model.num_heads": 6,
    "model.kernel_std": 0.05,
    "model.dtype": "bfloat16",
}
LLADA_SAS = (
    LLADA
    | POLICY
    | {
        "data.seq_len": 512,
        "method.policy": "transformer",
        "method.policy_width": 128,
        "method.inner_epochs": 2,
        "method.kl": 1e-3,
        "optim.lr": 3e-4,
        "optim.lr_floor": 3e-5,
        "train.global_batch": 16,
        "train.num_steps": 600,
        "stages.denoiser.steps": 0,
        "eval.orders": ("own", "any", "confidence"),
        "eval.batch": 16,
        "sample.batch": 16,
    }
)
PRESETS = {
    "": SUDOKU4,
    "misleading": SUDOKU4
    | {
        "data.clues": (6, 6),
        "model.num_layers": 3,
        "model.width": 64,
        "method.policy_cells": True,
        "method.advantage": "batch_rms",
        "method.mislead": (0, 5, 7, 10, 13),
        "stages.denoiser.steps": 464,
        "stages.second.steps": 0,
        "train.global_batch": 16,
        "train.num_steps": 480,
    },
    "smoke": SUDOKU4
    | {
        "data.eval_rows": 64,
        "stages.denoiser.steps": 40,
        "stages.second.steps": 10,
        "train.num_steps": 40,
        "eval.orders": ("own",),
        "eval.decoders": ("confidence", "own"),
        "eval.samples": 64,
        "eval.batch": 32,
    },
    "sudoku9": SUDOKU4
    | SUDOKU9
    | {
        "data.clues": (25, 35),
        "data.eval_rows": 1000,
        "eval.samples": 1000,
        "eval.batch": 100,
        "method.policy_width": 128,
        "stages.denoiser.steps": 30_000,
        "stages.denoiser.batch": 512,
        "stages.denoiser.lr": 1e-3,
        "stages.second.steps": 2000,
        "stages.second.batch": 512,
        "stages.second.lr": 1e-4,
        "train.global_batch": 64,
        "train.num_steps": 2000,
    },
    "sudoku_1b": SUDOKU4
    | {
        "checkpoint.needs": "the weights of SMDM-1028M (nieshen/SMDM) after an epoch of Sudoku",
        "data.name": "puzzles",
        "data.seq_len": 81,
        "data.clues": (),
        "model.num_layers": 20,
        "model.width": 1792,
        "model.num_heads": 14,
        "model.mlp": "swiglu",
        "model.mlp_dim": 7168,
        "model.position": "rope",
        "model.qk_norm": False,
        "model.mask_id": 32000,
        "model.table_size": 32001,
        "model.dtype": "bfloat16",
        "method.policy_width": 128,
        "stages.denoiser.steps": 0,
        "eval.samples": 1000,
        "eval.batch": 96,
        "stages.second.lr": 1e-5,
        "stages.second.steps": 1000,
        "train.global_batch": 16,
        "train.num_steps": 2000,
    },
    "llada_8b_gsm8k": LLADA_SAS,
    "llada_8b_mbpp": LLADA_SAS,
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("sas")
    config.update_from_flattened_dict(PRESETS[preset])
    return config
