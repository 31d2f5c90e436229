"""OrderGPT: one training run learns a generation order from attention and then trains in it.

  python -m aodiff.main --config=configs/ordergpt.py[:preset]
  python -m aodiff.main --config=configs/ordergpt.py[:preset] --mode=eval | --mode=sample

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | a medical table of 31 columns whose order is hidden, beside its file order, a random fixed order, any order and the learned order from scratch at equal compute | 2 CPU cores, 75 s | nats per column on validation: learned 0.910, any order 0.959, file order 1.131, random fixed 1.168, learned from scratch 1.172 (single orders overfit at this length; study_tabular stops each at its best) | run |
| digits | 8x8 digits with hidden pixel positions, beside the same | 2 CPU cores, 2 min | nats per pixel on validation: learned 0.474, any order 0.505, raster 0.441, random fixed 0.451, learned from scratch 0.446 | run |
| chain | hidden Markov chain of 24 units with known entropy 1.1278, beside its true order | 2 CPU cores, 3 min | own order within 0.03 nats of the true one | run |
| recover_chain | three hidden chains of 24 units, 8 values, noise 0.3 | 2 CPU cores, 5 min | best-arrangement tau at least 0.95 and link recall at least 0.9 in 2 of 3 | passed 3 of 3: tau 1, 0.986, 0.993; recall 0.957, 0.957, 0.913 |
| recover_chains20 | the same, twenty of them | 2 CPU cores, 30 min | tau and best-arrangement tau at least 0.95 in 19 of 20 | passed 20 of 20: tau 0.994 +- 0.002, lowest 0.971; see below |
| recover_tree | three hidden random trees of 24 units | 2 CPU cores, 5 min | link recall at least 0.85; arrangement cost at most 0.30 of a random order's | passed 3 of 3: recall 1, 1, 0.957; cost 0.217, 0.227, 0.292, where the line through the true links costs 0.227, 0.233, 0.292 |
| recover_blocks | three times two independent hidden chains of 12 units | 2 CPU cores, 5 min | one block switch, inner tau at least 0.9 in half of them | passed 3 of 3: 1 switch each, inner tau 0.939, 1, 0.939 |
| recover_skeleton | three hidden skeletons of 17 joint angles in 16 bins | 2 CPU cores, 5 min | arrangement cost at most 0.45 of a random order's, connected growth at least 0.85 | passed 3 of 3: cost 0.295, 0.285, 0.285; growth 0.875, 0.875, 0.938 |
| pose | stick figure of 15 bone angles in 16 bins, hidden order; exact entropy 1.2862 | 2 CPU cores, 2 min | own order within 0.05 nats of the entropy | run: 1.306, any order 1.400 |
| coco | COCO keypoints, 34 coordinates in 32 bins; add --config.data.dir=FOLDER with person_keypoints_*.json | 2 CPU cores, 3 min | runs | run for 40 steps of 8 on 15 people, too few to say anything |
| mocap | poses of BVH clips, 8 places per joint, sized for a handful of clips; add --config.data.dir=FOLDER with .bvh files and, for another skeleton than CMU's 20 joints, --config.data.seq_len; with many clips raise data.levels and train.num_steps | 2 CPU cores, 2 min | better than the joints' marginals (1.92 on CMU 131) | run on CMU 131: one training clip, 1.44, any order 1.54; size chosen on the same split; 24 places and 600 steps overfit (3.82) |
| adult | census table of 15 columns, numbers in 16 bins; add --config.data.dir=FOLDER with adult_train.csv and adult_test.csv | 2 CPU cores, 4 min | own order 1.084 +- 0.005 nats per column, any order 1.106 | run |
| california | housing table of 10 columns; add --config.data.dir=FOLDER with housing.csv | 2 CPU cores, 4 min | own order 1.844 +- 0.006, any order 1.979 | run |
| wine_quality | red and white wines, 13 columns; add --config.data.dir=FOLDER with winequality-red.csv and winequality-white.csv | 2 CPU cores, 3 min | own order 2.122 +- 0.008, any order 2.222 | run |
| abalone | table of 9 columns; add --config.data.dir=FOLDER with abalone.csv | 2 CPU cores, 6 min | own order 1.505 +- 0.019, any order 1.557 | run |
| csv | any table; add --config.data.dir=FILE.csv, whose first line names its columns, and --config.data.seq_len for their number; FILE.columns.json may say what they are | 2 CPU cores | as the table is | not run |
| language | English text that ships with Python, 64 characters, hidden order | 2 CPU cores, 5 min | own order 2.23 bits per character, any order 4.13; reading order found up to reversal (abs. tau 0.99) with this seed, not asserted | run |
| text8 | text8, 256 characters, hidden order; prepare it first | TPU v5e-8 | bits per character, closeness to reading order | not run |
| owt | OpenWebText, 1024 GPT-2 tokens, size of GPT-2 small; prepare it first | 32 TPU v4 or 16 H800 | held-out nats, closeness to reading order | not run |
| study_tabular | OrderGPT on the medical table beside file order, random fixed, a random order explored like its own, any order, greedy entropy, mutual-information line and its own order from scratch at equal compute; 3 seeds, 2 hidden permutations | 1 CPU core, 20 min | test nats per unit, differences paired, SE over 6 runs | OrderGPT 0.9364 +- 0.0042; above it: any_order +0.0168 +- 0.0039, l2r +0.0486 +- 0.0051, rand_fixed +0.0421 +- 0.0059, rand_explored -0.0063 +- 0.0058, greedy_entropy +0.0342 +- 0.0043, mi_fiedler +0.0429 +- 0.0039, scratch_sigma +0.0405 +- 0.0037 |
| study_language | the same on 32 characters of text | 1 CPU core, 21 min | test nats per unit, differences paired, SE over 6 runs | OrderGPT 1.9623 +- 0.0133; above it: any_order +0.3861 +- 0.0123, l2r -0.4527 +- 0.0125, rand_fixed +0.1751 +- 0.0113, rand_explored +0.3234 +- 0.0128, greedy_entropy -0.2414 +- 0.0158, mi_fiedler -0.4527 +- 0.0125, scratch_sigma -0.3716 +- 0.0111 |
| study_pose | the same on a thousand poses of the stick figure | 1 CPU core, 25 min | test nats per unit, differences paired, SE over 6 runs | OrderGPT 1.3325 +- 0.0022; above it: any_order +0.0483 +- 0.0027, l2r +0.0137 +- 0.0021, rand_fixed +0.0370 +- 0.0020, rand_explored +0.0192 +- 0.0020, greedy_entropy +0.0156 +- 0.0026, mi_fiedler +0.0202 +- 0.0032, scratch_sigma +0.0156 +- 0.0020 |
| study_images | the same on 8x8 digits | 1 CPU core, 25 min | test nats per unit, differences paired, SE over 6 runs | OrderGPT 0.4746 +- 0.0019; above it: any_order +0.0523 +- 0.0039, l2r -0.0257 +- 0.0010, rand_fixed -0.0120 +- 0.0022, rand_explored -0.0022 +- 0.0018, greedy_entropy -0.0112 +- 0.0027, mi_fiedler -0.0170 +- 0.0016, scratch_sigma -0.0167 +- 0.0018 |
| smoke | hidden chain of 8 units, tiny model | 2 CPU cores, 1 min | runs | run |

Recovery, from recover_chains20: when the order froze, 13 of the 20 chains had a link of weight
zero and 8 graphs had fallen into parts; the attention in excess of uniform, before it is clipped,
placed every part. The same evidence without it puts 13 of 20 chains above tau 0.95. Variants of the
command: 16 units, 20 of 20 (lowest tau 0.967); probe_decay 0.9 with probe_orders 1, also 20 of 20,
but 14 instead of 19 runs with a link recall of at least 0.9. The learner matters more: with those
two, model.injection=adaln and model.kernel_std=0.02, the chains of seeds 0 to 2 have 5 to 9 parts
and reach 0.90, 0.96 and 0.85.
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
    "method.probe_orders": 4,
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
RECOVER = CHAIN | {  # a hidden permutation and a law of its own for every seed
    "data.permute_seed": -1,
    "data.law_seed": -1,
    # Links are learned one by one until late: evidence of 200 steps ago hides the newest.
    "method.probe_decay": 0.7,
    "method.probe_orders": 2,
    "eval.measures": ("order",),
    "study.seeds": (0, 1, 2),
    "train.num_steps": 600,
}
POSE = CHAIN | {
    "data.name": "chain_pose",
    "data.seq_len": 15,
    "data.levels": 16,
    "eval.measures": ("order", "pose"),
}
CSV = CHAIN | {  # thousands of rows, so a model larger than TABLE's
    "data.levels": 16,
    "data.permute_seed": 1,
    "method.probe_orders": 2,
    "eval.measures": ("order", "table"),
    "optim.weight_decay": 0.1,
}
TEXT = SMALL | {
    "data.tokenizer": "char27",
    "data.seq_len": 64,
    "data.permute_seed": 1,
    "model.num_layers": 3,
    "model.width": 64,
    "eval.measures": ("order", "text"),
    "train.num_steps": 1200,
}
LARGE = {  # on accelerators
    "data.permute_seed": 1,
    "model.injection": "input",
    "model.dtype": "bfloat16",
    "optim.warmup_steps": 2000,
    "method.refresh_every": 100,
    "eval.every": 5000,
    "eval.orders": ("own", "any"),
    "eval.measures": ("order", "text"),
    "sample.num": 64,
    "sample.batch": 64,
    "sample.order": "own",
    "checkpoint.every": 5000,
    "log.every": 100,
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
    "recover_chain": RECOVER
    | {
        "criteria.order/arranged_tau": (0.95, 1.0, 2 / 3),
        "criteria.order/link_recall": (0.9, 1.0, 2 / 3),
    },
    "recover_chains20": RECOVER
    | {
        "study.seeds": tuple(range(20)),
        "criteria.order/tau": (0.95, 1.0, 0.95),
        "criteria.order/arranged_tau": (0.95, 1.0, 0.95),
    },
    "recover_tree": RECOVER
    | {
        "data.name": "tree",
        "train.num_steps": 1500,
        "criteria.order/link_recall": (0.85, 1.0, 1.0),
        "criteria.order/minla_ratio": (0.0, 0.30, 1.0),
    },
    "recover_blocks": RECOVER
    | {
        "data.name": "two_chains",
        "criteria.order/block_switches": (0, 1, 0.5),
        "criteria.order/inner_tau": (0.9, 1.0, 0.5),
    },
    "recover_skeleton": RECOVER
    | {
        "data.name": "skeleton",
        "data.seq_len": 17,
        "data.vocab": 16,
        "data.noise": 0.4,
        "train.num_steps": 800,
        "criteria.order/minla_ratio": (0.0, 0.45, 1.0),
        "criteria.order/connected_growth": (0.85, 1.0, 1.0),
    },
    "pose": POSE,
    "coco": POSE | {"data.name": "coco_keypoints", "data.seq_len": 34, "data.levels": 32},
    "mocap": POSE
    | {  # few clips: small and regularised, as for a small table
        "data.name": "bvh",
        "data.seq_len": 20,
        "data.levels": 8,
        "model.num_layers": 2,
        "model.width": 32,
        "optim.ema_decay": 0.99,
        "optim.weight_decay": 0.3,
        "train.num_steps": 200,
    },
    "adult": CSV | {"data.name": "adult", "data.seq_len": 15, "train.num_steps": 1500},
    "california": CSV
    | {"data.name": "california_housing", "data.seq_len": 10, "train.num_steps": 1500},
    "wine_quality": CSV | {"data.name": "wine_quality", "data.seq_len": 13},
    "abalone": CSV | {"data.name": "abalone", "data.seq_len": 9},
    "csv": CSV | {"data.name": "csv"},
    "language": TEXT,
    "text8": LARGE
    | {
        "data.name": "text8",
        "data.tokenizer": "char27",
        "data.seq_len": 256,
        "model.num_layers": 10,
        "model.width": 256,
        "train.global_batch": 512,
        "train.num_steps": 100_000,
        "eval.batch": 256,
    },
    "owt": LARGE
    | {
        "data.name": "openwebtext",
        "data.tokenizer": "gpt2",
        "data.seq_len": 1024,
        "model.num_layers": 12,
        "model.width": 768,
        "model.num_heads": 12,
        "model.remat": "dots",
        "optim.lr": 6e-4,
        "optim.lr_floor": 6e-5,
        "optim.ema_decay": 0.9999,
        "train.global_batch": 1024,
        "train.microbatches": 16,
        "train.num_steps": 500_000,
        "eval.batch": 64,
    },
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
STUDY = {  # every run at its best step on the validation split, numbers of the test split
    "study.seeds": (0, 1, 2),
    "study.permute_seeds": (1, 2),
    "eval.report_split": "test",
    "eval.samples": 256,
    "checkpoint.every": 200,
    "log.every": 100,
}
PRESETS |= {
    "study_tabular": TABLE
    | STUDY
    | {"train.num_steps": 800, "eval.every": 50, "eval.measures": ("order", "table")},
    "study_pose": POSE
    | STUDY
    | {  # a thousand poses, as a small collection of recordings has
        "data.train_rows": 1024,
        "model.num_layers": 2,
        "model.width": 32,
        "method.probe_orders": 4,
        "optim.ema_decay": 0.99,
        "optim.weight_decay": 0.3,
        "train.global_batch": 32,
        "train.num_steps": 1200,
        "eval.every": 75,
    },
    "study_images": PRESETS["digits"]
    | STUDY
    | {  # nothing overfits, so exploration is kept short
        "method.warmup": (0.05, 0.15),
        "method.shift": (0.15, 0.35),
        "method.freeze_from": 0.25,
        "method.settle": 0.5,
        "train.global_batch": 16,
        "train.num_steps": 800,
        "eval.every": 200,
        "eval.measures": ("order", "image"),
    },
    "study_language": TEXT
    | STUDY
    | {
        "data.seq_len": 32,
        "model.num_layers": 2,
        "model.width": 48,
        "train.num_steps": 800,
        "eval.every": 200,
    },
}
ARMS = {  # of a study: everything that is compared at equal compute
    "l2r": "native",
    "rand_fixed": "fixed(1)",
    "rand_explored": "anneal_to_fixed(1,{},{})",  # OrderGPT's exploration, but a random order
    "any_order": "uniform",
    "greedy_entropy": "greedy_entropy",
    "mi_fiedler": "mi_fiedler",
    "scratch_sigma": "learned",
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
    if preset in ("", "digits", "chain"):
        config.compare = COMPARE
    if preset.startswith("study_"):
        explores = config.method.shift[0], config.method.settle
        config.compare = {name: order.format(*explores) for name, order in ARMS.items()}
    return config
