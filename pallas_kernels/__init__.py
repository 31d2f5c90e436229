"""Attention with interval masks; depends on jax and numpy only."""

from pallas_kernels.cached import cached_attention
from pallas_kernels.config import AttentionConfig, default_config
from pallas_kernels.dense import dense_attention
from pallas_kernels.dispatch import (
    IMPLS,
    PLATFORMS,
    RESIDUALS,
    interval_attention,
    refusal,
    two_stream_attention,
)
from pallas_kernels.masks import (
    IntervalMask,
    causal_streams,
    length_mask,
    rank_streams,
    segment_mask,
    visible,
)
from pallas_kernels.merge import merge_attention
from pallas_kernels.reference import attention_reference
from pallas_kernels.sharding import shard_attention

__all__ = [
    "IMPLS",
    "PLATFORMS",
    "RESIDUALS",
    "AttentionConfig",
    "IntervalMask",
    "attention_reference",
    "cached_attention",
    "causal_streams",
    "default_config",
    "dense_attention",
    "interval_attention",
    "length_mask",
    "merge_attention",
    "rank_streams",
    "refusal",
    "segment_mask",
    "shard_attention",
    "two_stream_attention",
    "visible",
]
