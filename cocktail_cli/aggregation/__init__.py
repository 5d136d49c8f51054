"""Aggregators whose error feedback survives a crash."""

from .durable_aggregator import DurableAggregator, DurableShards
