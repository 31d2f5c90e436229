"""Comparison runs: the config of an arm that is trained with equal compute."""

import math

import ml_collections

from aodiff import data
from aodiff.config import MDM, METHOD_DEFAULTS, MODEL_DEFAULTS, SAMPLE_DEFAULTS, editable

# How an arm samples rows of one length where the run itself samples rows that grow.
CANVAS_SAMPLES = {
    MDM: dict(order="random", schedule="ancestral", block=0, buckets=()),
    "aogpt": dict(order="own", steps=0, block=0, buckets=()),
}


def arm(config, order: str) -> ml_collections.ConfigDict:
    """The config of an arm, trained with equal compute: an AO-GPT with `order`, or an MDM.

    The arm gets what OrderGPT spends on refreshes as extra steps, counted as if it refreshed until
    its latest freeze and always took all parts of a refresh. Where rows grow by insertion, the arm
    has the same data as rows of one length, ended by an end symbol.
    """
    c = editable(config)
    steps, method = c.train.num_steps, c.method
    if method.name == "ordergpt":
        refreshes = math.ceil(steps * method.shift[1] / method.refresh_every)
        c.train.num_steps = steps + math.ceil(refreshes * refresh_cost(c))
    if c.optim.decay_steps == steps:
        c.optim.decay_steps = c.train.num_steps
    name = MDM if order == MDM else "aogpt"
    c.method = ml_collections.ConfigDict(dict(METHOD_DEFAULTS[name], name=name))
    for key in MODEL_DEFAULTS[method.name]:
        del c.model[key]
    c.model.update({k: config.model.get(k, v) for k, v in MODEL_DEFAULTS[name].items()})
    if name == "aogpt":
        c.method.order = order
    else:
        c.model.mlp = "gelu"  # two matrices, as the others have
        c.eval.update(ensemble=0, marginal=0)
    if method.name in SAMPLE_DEFAULTS:
        for key in SAMPLE_DEFAULTS[method.name]:
            del c.sample[key]
        c.sample.update(CANVAS_SAMPLES[name])
        c.data.name += data.CANVAS
    c.compare = ml_collections.ConfigDict()
    return c.lock()


def refresh_cost(config) -> float:
    """Training steps that cost as much as one refresh of OrderGPT.

    `probe_orders` forward passes for the evidence and two for the direction are a third of a step
    each. The student's updates are counted in FLOPs, six per weight and row, against a step of a
    decoder without head, conditioning and attention scores: never too few.
    """
    m, n = config.method, config.data.seq_len
    weights = {  # times the rows it is applied to
        "row": n * (3 * n + 1) * m.student_width,
        "flat": 16 * m.student_width * (n * n + 8 * m.student_width) + 8 * m.student_width * n,
    }.get(m.student, 0)
    decoder = 12 * config.model.num_layers * config.model.width**2
    tokens = config.train.global_batch * n
    return (m.probe_orders + 2) / 3 + m.student_steps * weights / (decoder * tokens)
