"""A method small enough to compile in a second, with everything the loop has to carry: noise by
example, microbatches with unequal counts, sharded and stacked parameters, and state of its own."""

import dataclasses
import os
import signal
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from aodiff import config as config_lib
from aodiff import methods, rng
from aodiff.methods.base import Evaluation, LossOutput, Scores, token_rows
from aodiff.metrics import Mean, Sum

WIDTH, LAYERS = 8, 2


def boxed(value: jax.Array, *names: str | None) -> nn.LogicallyPartitioned:
    return nn.LogicallyPartitioned(value, names)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Predicts each token from the one before it, with tokens dropped at random."""

    vocab: int
    seq_len: int
    refresh_every: int = 3

    @classmethod
    def from_config(cls, config, info) -> "Toy":
        del config
        return cls(info.vocab_size, info.seq_len)

    def batch_spec(self, global_batch: int) -> dict[str, jax.ShapeDtypeStruct]:
        return token_rows(global_batch, self.seq_len)

    def init(self, key: jax.Array) -> dict:
        keys = jax.random.split(key, 3)
        normal = jax.random.normal
        return {
            "embed": boxed(normal(keys[0], (self.vocab, WIDTH)), "vocab", "embed"),
            "mix": boxed(0.3 * normal(keys[1], (LAYERS, WIDTH, WIDTH)), "layers", "embed", "mlp"),
            "bias": boxed(jnp.zeros((LAYERS, WIDTH)), "layers", "embed"),
            "head": boxed(normal(keys[2], (WIDTH, self.vocab)), "embed", "vocab"),
            "gain": boxed(jnp.ones(WIDTH), "embed"),
        }

    def init_extra(self) -> dict:
        return {"drop": np.float32(0.3), "trace": np.zeros(self.vocab, np.float32)}

    def draw(self, key, batch, step, params, extra):
        keys = rng.example_keys(key, jnp.arange(batch["tokens"].shape[0]))
        keep = jax.vmap(lambda k: jax.random.uniform(k, (self.seq_len,)))(keys) > extra["drop"]
        return batch | {"keep": keep}, extra

    def logits(self, params, tokens, keep):
        x = params["embed"][tokens] * keep[..., None] * params["gain"][None, None]
        for layer in range(LAYERS):
            y = jnp.einsum("bnd,df->bnf", x, params["mix"][layer])
            x = x + jnp.tanh(y + params["bias"][layer][None, None])
        return jnp.einsum("bnd,dv->bnv", x, params["head"])

    def nll(self, params, tokens, keep):
        logp = jax.nn.log_softmax(self.logits(params, tokens, keep)[:, :-1])
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]

    def loss_fn(self, params, batch) -> LossOutput:
        nll = self.nll(params, batch["tokens"], batch["keep"])
        scored = (batch["loss_mask"] & batch["keep"])[:, 1:]
        return LossOutput(Mean.of(nll, scored), {"scored": Sum(jnp.sum(scored, dtype=jnp.float32))})

    def refresh(self, params, batch, key, step, extra):
        """Also where a test stops the process: TOY_STOP="<signal>@<step>" or "KILL@9"."""
        name, _, when = os.environ.get("TOY_STOP", "").partition("@")
        if when == str(step) and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
            time.sleep(2)  # SIGTERM is noticed within a second, in which the toy would finish
        noise = jax.jit(lambda k: jax.random.uniform(k, (self.vocab,)))(key)
        norm = jax.jit(lambda p: jnp.sum(jnp.square(p["head"])))(params)
        trace = 0.9 * np.asarray(extra["trace"]) + 1e-3 * float(norm) * np.asarray(noise)
        extra = {"drop": np.float32(0.2 + 0.2 * trace.mean()), "trace": trace}
        return extra, {"toy/drop": float(extra["drop"])}

    def evaluations(self, config) -> dict[str, Evaluation]:
        def fn(params, batch, key, extra):
            keep = jnp.ones_like(batch["loss_mask"])
            scored = batch["loss_mask"][:, 1:]
            nll = jnp.sum(jnp.where(scored, self.nll(params, batch["tokens"], keep), 0.0), axis=1)
            return Scores(nll, jnp.sum(scored, axis=1, dtype=jnp.float32), {})

        return {"own": Evaluation(fn, "exact")}

    def sampler(self, config, max_given):
        """Present because every method has one; no test samples from the toy."""
        return lambda params, extra, keys, tokens, given: tokens

    def flops_per_token(self) -> float:
        return 2.0 * WIDTH * (LAYERS * WIDTH + self.vocab)


def register() -> None:
    """Adds the toy to the table of methods, under the name "toy"."""
    config_lib.METHOD_DEFAULTS["toy"] = config_lib.MODEL_DEFAULTS["toy"] = {}
    methods.METHODS["toy"] = Toy


def get_config(preset: str = ""):
    """A run of 12 steps with a checkpoint after 4 and 8 and a log line after 5 and 10."""
    register()
    c = config_lib.base("toy")
    c.data.update(dict(name="markov", seq_len=6, eval_rows=20, vocab=8))
    c.train.update(dict(global_batch=16, num_steps=12, microbatches=2))
    c.optim.update(dict(lr=1e-2, warmup_steps=2))
    c.eval.update(dict(batch=16, every=8))
    c.sample.batch = 16
    c.checkpoint.every = 4
    c.log.every = 5
    return c
