"""A run of OrderGPT resumed in the middle of its curriculum (ordergpt.md section 18.17)."""

import json
import shutil

import jax
import numpy as np

from aodiff import config as config_lib
from aodiff import partitioning, train
from aodiff.methods.ordergpt import OrderGPTMethod


def tiny():
    """48 steps: random orders to step 10, learned ones mixed in to step 34, only them from 38."""
    c = config_lib.base("ordergpt")
    c.data.update(dict(name="chain", seq_len=6, vocab=3, permute_seed=1, eval_rows=32))
    c.model.update(dict(num_layers=1, width=8, num_heads=1, injection="input"))
    c.method.update(dict(warmup=(0.0, 0.1), shift=(0.2, 0.7), freeze_from=0.7, settle=0.8))
    c.method.update(dict(refresh_every=4, student_width=4))
    c.train.update(dict(global_batch=32, num_steps=48))
    c.eval.update(dict(orders=("own",), batch=32))
    c.checkpoint.update(dict(every=20, keep_last=9))
    c.sample.batch = 32
    c.log.every = 1
    return c


def entries(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if "perf/" not in k} for x in lines]


def test_the_next_losses_and_orders_repeat_bit_for_bit(tmp_path, monkeypatch):
    make_mesh = partitioning.make_mesh  # one device: sums over several have no fixed order
    monkeypatch.setattr(
        partitioning, "make_mesh", lambda **sizes: make_mesh(**sizes, devices=jax.devices()[:1])
    )
    whole = train.train(tiny(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for path in ("checkpoints/40", "checkpoints/48", "eval"):
        shutil.rmtree(tmp_path / "again" / path)
    resumed = train.train(tiny(), tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole), jax.device_get(resumed))
    assert entries(tmp_path / "again") == entries(tmp_path / "whole")

    order = whole.extra
    learned = order.history[: int(np.sum(order.history_step >= 0))]
    assert 0 < order.order_step <= 20 < order.freeze_step  # step 20 is inside the shift
    assert (learned[-1] != learned[len(learned) // 2]).any()  # the order went on changing
    losses = [e["train/loss"] for e in entries(tmp_path / "whole") if "train/loss" in e]
    assert len(losses) == 48 and len(set(losses)) == 48


def test_nothing_the_order_depends_on_changes_after_the_freeze(tmp_path, monkeypatch):
    seen, refresh = [], OrderGPTMethod.refresh

    def watched(self, params, batch, key, step, extra):
        seen.append((step, jax.device_get(extra)))
        return refresh(self, params, batch, key, step, extra)

    monkeypatch.setattr(OrderGPTMethod, "refresh", watched)
    end = jax.device_get(train.train(tiny(), tmp_path / "run").extra)
    frozen = [extra for step, extra in seen if step > end.freeze_step]
    assert len(frozen) >= 2 and seen[0][1].freeze_step < 0
    for extra in frozen:
        jax.tree.map(np.testing.assert_array_equal, extra, end)
    assert not np.array_equal(seen[0][1].excess, end.excess)
