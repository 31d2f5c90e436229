"""Masked diffusion with insertion: strings of any length, written in any order.

  python -m aodiff.main --config=configs/flexmdm.py[:preset]
  python -m aodiff.main --config=configs/flexmdm.py[:preset] --mode=eval | --mode=sample

One command trains the model and its arms with equal optimiser and steps, masked diffusion ("mdm")
and left to right ("ar"), on the same strings filled up with an end symbol. Templates to fill in are
lines of sample.given, such as ["def f(x):\\n", null, "\\n    return y", {"masks": 2}], where null takes
any number of tokens; {"hole": [2, 9]} takes two to nine (more than the model would is off its law).

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | functions of Python's standard library, up to 63 words and signs | 2 CPU cores, 10 min | see below | run |
| bracket | balanced brackets of length 2 to 16 | 1 CPU core, 30 min | see below | run |
| bracket_64 | balanced brackets of length 4 to 64 | 1 accelerator | | not run |
| infill | a hole of unknown length in such a string, against a canvas that guesses it | 1 CPU core, 9 min | see below | run |
| maze, wins | paths through a maze by way of 2 to 5 subgoals, which stand in place or in a prompt | 1 CPU core, 8 min | see below | run |
| maze_41 | the same in a maze of 41 x 41 cells by way of 2 to 12 | 1 accelerator | | not run |
| owt_175m | OpenWebText, GPT-2 tokens, up to 1023 | 16 chips of 16 GB: 6.9 GiB each, 56 TFLOP a step | | compiled, not run |
| dreamcoder_7b | Dream-Coder-7B taught to insert, instructions in Python up to 767 tokens | 64 chips of 96 GB | | not run |
| llada_8b | LLaDA-8B-Base taught to insert, text up to 1023 tokens, all weights and no LoRA | 64 chips of 96 GB | | not run |
| dreamcoder_7b_smoke | the same parts, tiny and without its weights, functions of Python | 1 CPU core, 1 min | | not run |
| smoke | balanced brackets of length 2 to 16, tiny model | 1 CPU core, 1 min | runs | run |

(none), 400 samples: 0.30 +- 0.02 of those with insertion are Python (0.50 +- 0.03 on the canvas, all
left to right, which has learned rows by heart), lengths are off by 2.3 words (18.5; 2.6), and a line
of unknown length, written anew, gives Python in 0.41 of functions and the very line in 0.03. At most
108.2 +- 3.5 nats a row with insertion, 104.0 +- 3.4 on the canvas, 167.0 +- 7.6 left to right. In
which order were statements written (CBC, RUB, RUB+, OBW over statements that hold several):

                      as written                 left to right              in a random order
  insertion, 18       0.97  0.92  0.74  0.97     0.50  0.00  0.00  0.50     0.98  0.93  0.83  0.97
  canvas, 7           0.79  0.57  0.43  0.79     0.50  0.00  0.00  0.50     0.84  0.62  0.50  0.78
  left to right, 59   0.49  0.00  0.00  0.49     0.49  0.00  0.00  0.49     0.98  0.93  0.81  0.97

The numbers are those of programs: an order as good as random on both, and no more than that.

Likelihoods of rows count their ends. bracket, 1024 strings, entropy 3.253 nats a string: at most
3.476 +- 0.091 with insertion, 3.288 +- 0.073 on the canvas, 3.252 +- 0.071 left to right (exact);
with insertion 0.188 +- 0.043 worse than the canvas, row by row. 2000 samples, share balanced and
distance of lengths in tokens (W1; 0.03 for as many strings of the data), by number of steps:

                          16            64           256          1024
  insertion, linear   0.565 0.594   0.764 0.317   0.844 0.148   0.904 0.168
  insertion, sin      0.714 0.496   0.858 0.205   0.903 0.127   0.924 0.146
  insertion, power    0.756 0.749   0.853 0.348   0.892 0.177   0.909 0.173
  canvas, random      0.898 0.237   0.969 0.036   0.986 0.114   0.996 0.104
  left to right       1.000 0.044 with 16 calls

On short strings a tight canvas is ahead in all of these. One model serves the three schedules.

infill, 1024 strings: 0.934 +- 0.008 of those with insertion are balanced and of a possible length,
0.992 +- 0.003 on a canvas told a length drawn from the law of lengths, 0.999 +- 0.001 told the true
one; lengths are off by 0.195, 0.074, 0.069 tokens, with 220, 2.9, 2.8 calls. Here too the canvas is
ahead: nearly every guess fits. Its likelihood in that table is given the length.

Nor does insertion win on a loose canvas at equal steps (bracket, --config.data.seq_len=56
--config.train.global_batch=64 --config.train.num_steps=1500, 1024 samples): 0.641 balanced and
lengths off by 1.07 tokens, on the canvas 0.962 and 0.13.

maze, wins: here insertion is ahead of a canvas, though not of left to right. It starts from the
subgoals, with room between any two; a canvas reads them in a prompt, and may also be told the places
they have in another path with as many, or in the true one. Share of paths that keep to free cells
and visit all subgoals in their order, of 1024 with seed 0, by number of subgoals, too, and of 512
with seed 1:

                                       calls  GFLOP     seed 0          2     3     4     5      seed 1
  insertion                               62   0.19  0.771 +- 0.013   0.82  0.83  0.76  0.67  0.748 +- 0.019
  insertion                              247   0.75  0.860 +- 0.011   0.92  0.83  0.87  0.81  0.828 +- 0.017
  canvas, prompt, random                  38   0.41  0.152 +- 0.011   0.41  0.13  0.05  0.02  0.121 +- 0.014
  canvas, prompt, likely first            38   0.41  0.212 +- 0.013   0.52  0.21  0.10  0.02  0.174 +- 0.017
  canvas, drawn places, likely first      12   0.13  0.105 +- 0.010   0.32  0.06  0.03  0.01  0.096 +- 0.013
  canvas, true places, likely first       12   0.13  0.733 +- 0.014   0.94  0.80  0.67  0.52  0.641 +- 0.021
  left to right, prompt                   41         0.945 +- 0.007   1.00  0.99  0.94  0.86

Paired by path, the canvas with a prompt is behind the first row by 0.559 +- 0.018 and 0.574 +- 0.024,
and that at true places by 0.037 +- 0.018. Bounds are at most 3.47 +- 0.09 nats a path with insertion,
6.64 +- 0.15 on the canvas, 0.40 +- 0.02 left to right (exact). But the paths of insertion make
detours: they have 18.9 cells and not 16.0, and 0.32 of all are right and the shortest (0.18 on the
canvas with a prompt, 0.73 at true places, 0.91 left to right).
Insertion has 0.21 million parameters, the canvas 0.12;
a canvas that trains longer or is as large has not been run.
"""

from aodiff.config import ConfigError, base
from aodiff.pretrained import DREAM, LLADA

FLEX = {"eval.orders": ("own",), "eval.num_orders": 64, "sample.order": "own"}
ARMS = {"compare": {"mdm": "mdm", "ar": "l2r"}}  # on a canvas, with equal optimiser and steps
SINE = {
    "method.insertion": "sin",
    "method.unmasking": "linear",
    "model.cond_dim": 64,
    "sample.insertion": "sin",
    "sample.unmasking": "linear",
}
BRACKETS = (
    FLEX
    | ARMS
    | {
        "data.name": "brackets",
        "data.seq_len": 64,
        "data.eval_rows": 1024,
        "model.width": 256,
        "model.kernel_std": 0.05,
        "optim.lr": 1e-4,
        "optim.lr_floor": 1e-6,
        "optim.warmup_steps": 1000,
        "optim.b2": 0.999,
        "optim.weight_decay": 0.01,
        "optim.ema_decay": 0.99,
        "train.global_batch": 2048,
        "train.num_steps": 10_000,
        "eval.batch": 128,
        "eval.measures": ("brackets",),
        "eval.samples": 2000,
        "eval.steps": (16, 64, 256, 1024),
        "checkpoint.every": 1000,
        "log.every": 100,
        "sample.steps": 256,
    }
)
CPU = {
    "data.seq_len": 16,
    "data.lengths": (2, 4, 8, 16),
    "model.num_layers": 2,
    "model.width": 64,
    "model.kernel_std": 0.1,
    "optim.lr": 2e-3,
    "optim.lr_floor": 1e-5,
    "optim.warmup_steps": 100,
    "optim.b2": 0.99,
    "optim.ema_decay": 0.995,
    "train.global_batch": 128,
    "train.num_steps": 3000,
}
SMALL = BRACKETS | SINE | CPU
MAZE = {
    "data.name": "maze",
    "data.lengths": (),
    "data.clues": (2, 5),
    "data.maze": (9, 0.25),
    "data.seq_len": 46,
    "model.classes": 10,
    "train.global_batch": 64,
    "train.num_steps": 1500,
    "eval.measures": ("maze",),
    "eval.samples": 1024,
    "eval.steps": (64, 256),
    "sample.count": "thin",
}
# A published model that learns to insert. It is told the time, as its authors do.
RETROFIT = FLEX | {
    "method.name": "flexmdm_retrofit",
    "method.condition": "time",
    "model.remat": "full",
    "optim.lr_floor": 0.0,
    "optim.weight_decay": 0.01,
    "eval.batch": 64,
    "sample.batch": 64,
    "sample.crop": False,
    "checkpoint.every": 500,
    "log.every": 10,
}
DREAMCODER = (
    DREAM
    | RETROFIT
    | {
        "checkpoint.needs": "the weights of Dream-Coder-7B (Dream-org/Dream-Coder-v0-Base-7B, "
        "15.2 GB)",
        "data.name": "opencoder_python",
        "data.tokenizer": "hf:dreamcoder/tokenizer.json",
        "data.seq_len": 767,
        "model.anchor_id": 151665,
        "optim.lr": 1e-5,
        "optim.warmup_steps": 7500,
        "train.global_batch": 576,
        "train.num_steps": 75_000,
        "sample.order": "confidence",
        "sample.steps": 512,
    }
)
PRESETS = {
    "": FLEX
    | ARMS
    | {
        "data.name": "python_functions",
        "data.tokenizer": "python:1024",
        "data.seq_len": 63,
        "model.num_layers": 3,
        "model.width": 128,
        "model.kernel_std": 0.08,
        "optim.lr": 2e-3,
        "optim.lr_floor": 2e-4,
        "optim.ema_decay": 0.995,
        "train.global_batch": 32,
        "train.num_steps": 2000,
        "eval.num_orders": 8,
        "eval.measures": ("functions",),
        "eval.samples": 400,
        "sample.temperature": 0.5,
        "sample.steps": 128,
    },
    "bracket": SMALL,
    "bracket_64": BRACKETS | SINE,
    "infill": SMALL
    | {
        "data.name": "brackets_infill",
        "eval.measures": ("infill",),
        "eval.samples": 1024,
        "eval.steps": (),
        "compare": {"mdm": "mdm"},
    },
    "maze": SMALL | MAZE,
    "wins": SMALL | MAZE,
    "maze_41": BRACKETS
    | SINE
    | MAZE
    | {
        "data.clues": (2, 12),
        "data.maze": (41, 0.25),
        "data.seq_len": 475,
        "model.num_layers": 8,
        "model.width": 512,
        "model.num_heads": 8,
        "model.classes": 42,
        "train.global_batch": 256,
        "train.num_steps": 100_000,
        "eval.steps": (256, 1024),
    },
    "owt_175m": FLEX
    | {
        "data.name": "openwebtext",
        "data.tokenizer": "gpt2",
        "data.seq_len": 1023,
        "method.insertion": "linear",
        "method.unmasking": "linear",
        "model.num_layers": 12,
        "model.width": 768,
        "model.num_heads": 12,
        "model.dtype": "bfloat16",
        "model.remat": "dots",
        "optim.lr": 3e-4,
        "optim.warmup_steps": 2000,
        "optim.weight_decay": 0.03,
        "optim.b2": 0.999,
        "optim.ema_decay": 0.9999,
        "train.global_batch": 1024,
        "train.microbatches": 4,
        "train.num_steps": 500_000,
        "eval.num_orders": 16,
        "checkpoint.every": 1000,
        "log.every": 100,
        "sample.batch": 16,
        "sample.steps": 1024,
        "sample.buckets": (128, 256, 512, 768),
    },
    "dreamcoder_7b": DREAMCODER,
    "llada_8b": LLADA
    | RETROFIT
    | {
        "checkpoint.needs": "the weights of LLaDA-8B-Base (GSAI-ML/LLaDA-8B-Base, 16.0 GB)",
        "data.name": "openwebtext",
        "data.seq_len": 1023,
        "method.insertion": "geometric(10,0.01)",
        "method.unmasking": "linear",
        "model.anchor_id": 126080,
        "model.modulators": 4,
        "optim.lr": 1e-5,
        "optim.warmup_steps": 10_000,
        "train.global_batch": 64,
        "train.num_steps": 200_000,
        "sample.insertion": "linear",
        "sample.unmasking": "linear",
        "sample.order": "margin",
        "sample.steps": 256,
    },
    "dreamcoder_7b_smoke": DREAMCODER
    | {
        "checkpoint.needs": "",
        "checkpoint.every": 10,
        "data.name": "python_functions",
        "data.tokenizer": "byte",
        "data.seq_len": 63,
        "data.eval_rows": 64,
        "model.num_layers": 2,
        "model.width": 128,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.mlp_dim": 256,
        "model.dtype": "float32",
        "model.mask_id": 257,
        "model.anchor_id": 258,
        "model.table_size": 384,
        "optim.lr": 1e-3,
        "optim.warmup_steps": 10,
        "train.global_batch": 16,
        "train.num_steps": 20,
        "eval.num_orders": 2,
        "sample.steps": 16,
    },
    "smoke": SMALL
    | {
        "data.eval_rows": 128,
        "model.num_layers": 1,
        "model.width": 32,
        "train.global_batch": 64,
        "train.num_steps": 100,
        "optim.warmup_steps": 10,
        "checkpoint.every": 50,
        "log.every": 20,
        "eval.num_orders": 8,
        "eval.samples": 200,
        "eval.steps": (),
        "sample.steps": 32,
        "sample.buckets": (6, 10),
    },
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base(PRESETS[preset].get("method.name", "flexmdm"))
    config.update_from_flattened_dict(PRESETS[preset])
    return config
