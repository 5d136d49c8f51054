"""Aggregators whose error feedback survives a crash."""

from .durable_aggregator import LEAST_LOG, NEVER, DurableAggregator, DurableShards, rejections
