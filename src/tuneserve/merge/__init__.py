"""Merge an adapter into its base: any size, bounded memory, bit for bit, proven."""

from tuneserve.merge.run import MergeResult, merge_adapter

__all__ = ["MergeResult", "merge_adapter"]
