"""Masked diffusion: a bidirectional model that fills hidden positions in any order.

  python -m aodiff.main --config=configs/mdm.py[:preset]
  python -m aodiff.main --config=configs/mdm.py[:preset] --mode=eval | --mode=sample

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | English text that ships with Python, bytes, rows of 64 | 1 CPU core, 2 min | bound 2.228 +- 0.017, left to right 2.280 +- 0.013 nats | run |
| sudoku4 | Sudoku 4x4 with 0 to 11 random clues, five decoders | 1 CPU core, 2 min | see below | run |
| sudoku_6m | Sudoku 9x9 with 17 to 60 random clues, 7 M parameters | 1 accelerator | | not run |
| sudoku_25m | as sudoku_6m, 25 M parameters | 1 accelerator | | not run |
| smoke | hidden chain of 8 units, tiny model | 2 CPU cores, 1 min | runs | run |
| llada_8b_gsm8k | LLaDA-8B-Instruct, answers of 256 in blocks of 8 | 1 chip of 32 GB or 4 of 16 GB (16.0 GB of weights) | 78.6 to 78.9 % | published; not run here |
| llada_8b_humaneval | the same, 512 positions at once, no end of text | same | pass@1 47.0 to 49.4 % | published; not run here |
| llada_8b_mbpp | the same, 256 positions at once, end of text last | same | pass@1 39.6 to 41.0 % | published; not run here |
| mdlm_owt | MDLM on OpenWebText, 170 M parameters, texts of 1024 | 1 chip (0.7 GB of weights) | perplexity bound 23.2 | published; not run here |
| dream_7b_gsm8k | Dream-7B-Instruct, answers of 256 | same, at most 4 chips a model (15.2 GB) | settings as published | not run here |
| dream_7b_humaneval | the same, answers of 768 | same | settings as published | not run here |
| dream_7b_mbpp | the same, answers of 1024 | same | settings as published | not run here |

The presets of published models need the weights of their authors, which
`python -m aodiff.tools.import_torch` reads, and the larger ones their tokenizer.json
(--config.data.tokenizer=hf:FILE), and say so. Rows hold a prompt and its answer. Prompts and scores
are made by `python -m aodiff.tools.score`: the published numbers are LLaDA's own and OpenCompass's,
on GSM8K with four worked examples in chat turns (--examples), on Dream with none.

sudoku4, share of 1000 puzzles of 36 unseen grids that are solved (with 0 to 2 clues): random
0.774 (0.618), l2r 0.879 (0.871), margin 0.941 (0.805), confidence 0.946 (0.830), entropy 0.996
(1.000); standard errors of all puzzles up to 0.013. Puzzles of a file, with the trained model:

  python -m aodiff.main --config=configs/mdm.py:sudoku_6m --mode=eval --config.data.name=puzzles
    --config.data.dir=FILE.csv --config.data.clues="()"
"""

from aodiff.config import ConfigError, base
from aodiff.pretrained import DREAM, LLADA, MDLM_OWT

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
SUDOKU4 = {
    "data.name": "sudoku4",
    "data.seq_len": 16,
    "data.clues": (0, 11),
    "data.train_rows": 100_000,
    "data.eval_rows": 1000,
    "model.num_layers": 2,
    "model.width": 48,
    "model.position": "grid",
    "model.mlp": "gelu",
    "model.kernel_std": 0.1,
    "optim.lr": 2e-3,
    "optim.lr_floor": 2e-4,
    "optim.warmup_steps": 20,
    "optim.ema_decay": 0.99,
    "train.global_batch": 128,
    "train.num_steps": 300,
    "eval.orders": ("own", "l2r"),
    "eval.batch": 100,
    "eval.split": "test",
    "eval.measures": ("sudoku",),
    "eval.decoders": ("random", "l2r", "entropy", "margin", "confidence"),
    "eval.samples": 1000,
    "sample.order": "confidence",
    "sample.temperature": 0.0,
}
SUDOKU = SUDOKU4 | {
    "data.name": "sudoku",
    "data.seq_len": 81,
    "data.clues": (17, 60),
    "data.train_rows": 1_048_576,
    "model.num_layers": 4,
    "model.width": 384,
    "model.num_heads": 6,
    "model.kernel_std": 0.05,
    "model.dtype": "bfloat16",
    "optim.lr": 1e-3,
    "optim.lr_floor": 1e-5,
    "optim.warmup_steps": 500,
    "optim.ema_decay": 0.999,
    "train.global_batch": 512,
    "train.num_steps": 30_000,
    "eval.batch": 128,
    "checkpoint.every": 1000,
    "log.every": 100,
}
PRESETS = {
    "": TEXT,
    "sudoku4": SUDOKU4,
    "sudoku_6m": SUDOKU,
    "sudoku_25m": SUDOKU
    | {
        "model.num_layers": 8,
        "model.width": 512,
        "model.num_heads": 8,
        "optim.lr": 5e-4,
        "train.num_steps": 60_000,
    },
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
    "llada_8b_gsm8k": LLADA | {"sample.canvas": (256, 256), "sample.block": 8},
    "llada_8b_humaneval": LLADA | {"sample.canvas": (512, 512), "sample.eos": "never"},
    "llada_8b_mbpp": LLADA | {"sample.canvas": (256, 256), "sample.eos": "last"},
    "mdlm_owt": MDLM_OWT,
    "dream_7b_gsm8k": DREAM | {"sample.canvas": (256, 256)},
    "dream_7b_humaneval": DREAM | {"sample.canvas": (768, 768), "data.seq_len": 1536},
    "dream_7b_mbpp": DREAM | {"sample.canvas": (1024, 1024), "data.seq_len": 2048},
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("mdm")
    config.update_from_flattened_dict(PRESETS[preset])
    return config
