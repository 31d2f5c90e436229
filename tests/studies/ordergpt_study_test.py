"""Does OrderGPT find a hidden order, and does it pay? Chains whose entropy is known (section 17).

A chain's units are numbered by a hidden permutation. It reads equally well from both ends, so that
Kendall's tau counts without its sign.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aodiff import data, methods, optim, partitioning, rng, steps
from aodiff.config import base
from aodiff.core import graph
from aodiff.core.orders import kendall_tau
from aodiff.data.pipeline import as_batch
from aodiff.state import abstract_params, abstract_state, init_state
from configs.ordergpt import get_config


def chain_config(n, num_steps, seed, **flat):
    """The preset with another length, budget and seed, and with `flat`."""
    config = get_config("recover_chain")
    config.seed = seed
    config.data.update(seq_len=n, law_seed=seed, permute_seed=10 + seed)
    config.optim.ema_decay = 0.0
    config.train.num_steps = num_steps
    config.update_from_flattened_dict(flat)
    return config


def fit(config, order=None):
    """Trains OrderGPT, or an AO-GPT on the distribution `order`: (method, final state)."""
    if order is not None:
        config = config.copy_and_resolve_references()
        config.method = base("aogpt").method
        config.method.order = order
    method = methods.build(config, data.describe(config.data))
    source = data.open_splits(config.data)["train"]
    mesh = partitioning.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    mask = optim.decay_mask(abstract_params(method))
    tx = optim.make_optimizer(config.optim, config.train.num_steps, mask)
    abstract = abstract_state(method, tx, False, mesh)
    state = init_state(method, tx, False, abstract, config.seed)
    size = config.train.global_batch
    step_fn = steps.make_train_step(method, tx, 1, 0.0)
    step_fn = steps.compile_train_step(step_fn, abstract, method.batch_spec(size), mesh)
    for step in range(1, config.train.num_steps + 1):
        rows = np.arange((step - 1) * size, step * size)
        batch = jax.device_put(batch_of(source, rows), partitioning.batch_sharding(mesh))
        state, _ = step_fn(state, batch, jnp.uint32(config.seed))
        if method.refresh_every and step % method.refresh_every == 0:
            with jax.set_mesh(mesh):
                key = rng.stream(config.seed, rng.PROBE, step)
                extra, _ = method.refresh(state.params, batch, key, step, state.extra)
            state = state.replace(extra=extra)
    return method, state


def batch_of(source, rows):
    return as_batch(source.read(rows), rows)


def held_out_nll(method, state, config, name):
    """Nats per unit on 2,048 held-out rows."""
    source = data.open_splits(config.data)["validation"]
    score = jax.jit(method.evaluation(name, 4).fn)
    found = [
        score(
            state.params,
            jax.device_put(batch_of(source, np.arange(start, start + 256))),
            rng.stream(config.seed, rng.EVAL),
            state.extra,
        )
        for start in range(0, 2048, 256)
    ]
    return float(sum(s.nll.sum() for s in found) / sum(s.count.sum() for s in found))


def recovery(method, state):
    """(|tau| of the learned order, share of the chain's links in the heaviest spanning tree)."""
    tau = abs(kendall_tau(np.asarray(state.extra.order), np.array(method.native)))
    excess, count = (np.asarray(x).sum(0) for x in (state.extra.excess, state.extra.count))
    weight = graph.reciprocal_graph(graph.dependency(excess, count))
    tree = graph.maximum_spanning_tree(weight)
    links = {tuple(sorted(pair)) for pair in zip(method.native, method.native[1:], strict=False)}
    return tau, len(links & set(tree)) / len(links)


def test_a_short_chain_is_found_and_pays():
    config = chain_config(8, 240, 0, **{"data.noise": 0.1, "data.vocab": 4, "model.width": 32})
    config.update_from_flattened_dict({"model.num_layers": 2, "train.global_batch": 32})
    config.data.eval_rows = 2048
    method, state = fit(config)
    tau, recall = recovery(method, state)
    own = held_out_nll(method, state, config, "own")
    entropy = data.describe(config.data).entropy
    assert tau > 0.9 and recall > 0.8 and state.extra.freeze_step > 0
    assert entropy - 0.03 < own < entropy + 0.08
    assert own < held_out_nll(method, state, config, "any") - 0.2


@pytest.mark.slow
def test_hidden_chains_are_recovered():
    found = []
    for seed in range(3):
        found.append(recovery(*fit(chain_config(16, 600, seed))))
    print("|tau|, link recall:", found)
    assert sum(tau >= 0.95 and recall >= 0.9 for tau, recall in found) >= 2


@pytest.mark.slow
def test_one_run_beats_any_order_and_nears_the_oracle():
    config = chain_config(24, 800, 0)
    config.data.eval_rows = 2048
    nll = {}
    for name, order in (("own", None), ("any", "uniform"), ("oracle", "native")):
        nll[name] = held_out_nll(
            *fit(config, order), config, "any" if order == "uniform" else "own"
        )
    print("nats per unit:", nll, "entropy:", data.describe(config.data).entropy)
    assert nll["own"] < nll["any"] - 0.1
    assert nll["own"] < nll["oracle"] + 0.03
