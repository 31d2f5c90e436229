"""AO-GPT: any-order GPT (arXiv 2506.19935), its order policies, injections and baselines.

  python -m aodiff.main --config=configs/aogpt.py[:preset]
  python -m aodiff.main --config=configs/aogpt.py[:preset] --mode=eval | --mode=sample

| preset | reproduces | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | 10 % left-to-right orders, on English text that ships with Python | 2 CPU cores | README | run |
| nomix | the same without left-to-right orders | 2 CPU cores | README | run |
| input, drope, twostream | the default with another target injection (aogpt.md 16.2) | 2 CPU cores | README | run |
| smoke | generated Markov chain, tiny model | 2 CPU cores, 1 min | runs | run |
| nano | known-entropy chain, L3 d48 (orders of convergence) | 2 CPU cores, 2 min | README | run |
| owt_small | paper table 5, AO-GPT 10 % L2R | 16 H800 in the paper | WikiText-103 PPL 40.97 / 45.44 | not yet run |
| owt_small_nomix | the same, uniform orders | 16 H800 | | not yet run |
| owt_medium | paper tables 1 and 3 | 32 H800 | WikiText-103 PPL 30.86 / 32.38 | not yet run |
| sigmagpt_small | paper table 5, sigma-GPT | 16 H800 | 55.54 / 50.75 | not yet run |
| sigmagpt_medium | paper table 1, sigma-GPT | 32 H800 | 43.68 / 41.80 | not yet run |
| order_l2r, order_fixed1, order_fixed2, order_fixed3, order_block4 | paper figure 2a | 16 H800 | order of curves | not yet run |
| inject_input, inject_adaln, inject_shared, inject_own | paper figure 5 | 16 H800 | adaln best | not yet run |
| twostream_small | two streams at the size of owt_small | 16 H800 | | not yet run |
| aogpt_text8_128, drope_text8_128, twostream_text8_128 | arXiv 2602.16092, n = 128 | TPU v5e-8 | near MDLM | not yet run |
| aogpt_text8_1024, drope_text8_1024, twostream_text8_1024 | the same, n = 1024 | TPU v5e-8 | D-RoPE worse | not yet run |

PPL pairs are left-to-right / any-order.
"""

from aodiff.config import ConfigError, base

TEXT = {  # two minutes on two CPU cores
    "data.seq_len": 64,
    "model.num_layers": 3,
    "model.width": 64,
    "model.cond_dim": 32,
    "optim.lr": 2e-3,
    "optim.lr_floor": 2e-4,
    "optim.warmup_steps": 100,
    "train.num_steps": 2400,
    "eval.batch": 128,
    "checkpoint.every": 200,
    "log.every": 100,
}
OWT_SMALL = {
    "data.name": "openwebtext",
    "data.tokenizer": "gpt2",
    "data.seq_len": 1024,
    "model.num_layers": 12,
    "model.width": 768,
    "model.num_heads": 12,
    "model.dtype": "bfloat16",
    "model.remat": "dots",
    "optim.lr": 6e-4,
    "optim.lr_floor": 6e-5,
    "optim.warmup_steps": 2000,
    "optim.ema_decay": 0.9999,
    "train.global_batch": 1024,
    "train.microbatches": 16,
    "train.num_steps": 500_000,
    "eval.every": 5000,
    "eval.batch": 64,
    "sample.num": 64,
    "sample.batch": 64,
    "checkpoint.every": 5000,
    "log.every": 100,
}
OWT_MEDIUM = OWT_SMALL | {
    "model.num_layers": 24,
    "model.width": 1024,
    "model.num_heads": 16,
    "optim.lr": 3e-4,
}
SIGMA = {
    "model.injection": "input",
    "model.norm": "layer",
    "model.qk_norm": False,
    "model.tied_head": True,
    "method.order": "uniform",
}
ONE_ORDER = {
    "train.global_batch": 512,
    "train.microbatches": 8,
    "train.num_steps": 20_000,
    "optim.decay_steps": 500_000,
    "eval.orders": ("own", "l2r", "any"),
}
TEXT8 = {
    "data.name": "text8",
    "data.tokenizer": "char27",
    "data.seq_len": 128,
    "model.num_layers": 10,
    "model.width": 256,
    "model.num_heads": 4,
    "model.dtype": "bfloat16",
    "method.order": "uniform",
    "train.global_batch": 512,
    "train.num_steps": 100_000,
    "optim.warmup_steps": 2000,
    "eval.every": 5000,
    "eval.batch": 256,
    "sample.num": 64,
    "sample.batch": 64,
    "checkpoint.every": 5000,
    "log.every": 100,
}
NANO = {
    "data.name": "markov",
    "data.seq_len": 24,
    "model.num_layers": 3,
    "model.width": 48,
    "model.cond_dim": 16,
    "optim.lr": 3e-3,
    "optim.lr_floor": 3e-4,
    "optim.warmup_steps": 100,
    "train.num_steps": 2000,
    "eval.batch": 64,
}
LONG = {"data.seq_len": 1024, "train.global_batch": 64}

PRESETS = {
    "": TEXT,
    "nomix": TEXT | {"method.order": "uniform"},
    "input": TEXT | {"model.injection": "input"},
    "drope": TEXT | {"model.injection": "decoupled_rope"},
    "twostream": TEXT | {"model.injection": "two_stream"},
    "smoke": NANO
    | {
        "model.num_layers": 2,
        "train.num_steps": 60,
        "optim.warmup_steps": 10,
        "checkpoint.every": 20,
    },
    "nano": NANO,
    "owt_small": OWT_SMALL,
    "owt_small_nomix": OWT_SMALL | {"method.order": "uniform", "optim.weight_decay": 0.03},
    "owt_medium": OWT_MEDIUM,
    "sigmagpt_small": OWT_SMALL | SIGMA,
    "sigmagpt_medium": OWT_MEDIUM | SIGMA,
    "order_l2r": OWT_SMALL | ONE_ORDER | {"method.order": "l2r"},
    "order_fixed1": OWT_SMALL | ONE_ORDER | {"method.order": "fixed(1)"},
    "order_fixed2": OWT_SMALL | ONE_ORDER | {"method.order": "fixed(2)"},
    "order_fixed3": OWT_SMALL | ONE_ORDER | {"method.order": "fixed(3)"},
    "order_block4": OWT_SMALL | ONE_ORDER | {"method.order": "block_fixed(4)"},
    "inject_input": OWT_SMALL | {"model.injection": "input", "train.num_steps": 40_000},
    "inject_adaln": OWT_SMALL | {"train.num_steps": 40_000},
    "inject_shared": OWT_SMALL
    | {"model.injection": "every_layer_shared", "train.num_steps": 40_000},
    "inject_own": OWT_SMALL | {"model.injection": "every_layer_own", "train.num_steps": 40_000},
    "twostream_small": OWT_SMALL | {"model.injection": "two_stream"},
    "aogpt_text8_128": TEXT8,
    "aogpt_text8_1024": TEXT8 | LONG,
    "drope_text8_128": TEXT8 | {"model.injection": "decoupled_rope"},
    "drope_text8_1024": TEXT8 | LONG | {"model.injection": "decoupled_rope"},
    "twostream_text8_128": TEXT8 | {"model.injection": "two_stream"},
    "twostream_text8_1024": TEXT8 | LONG | {"model.injection": "two_stream"},
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("aogpt")
    config.update_from_flattened_dict(PRESETS[preset])
    return config
