"""Merge an adapter into its base: any size, bounded memory, bit for bit, proven."""

from tuneserve.merge.result import MergeResult
from tuneserve.merge.run import merge_adapter

__all__ = ["MergeResult", "merge_adapter"]
