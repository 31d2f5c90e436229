"""Attention with interval masks; depends on jax and numpy only."""

from pallas_kernels.dense import dense_attention
from pallas_kernels.dispatch import IMPLS, interval_attention
from pallas_kernels.masks import (
    IntervalMask,
    causal_streams,
    length_mask,
    rank_streams,
    visible,
)
from pallas_kernels.reference import attention_reference

__all__ = [
    "IMPLS",
    "IntervalMask",
    "attention_reference",
    "causal_streams",
    "dense_attention",
    "interval_attention",
    "length_mask",
    "rank_streams",
    "visible",
]
