"""Checkpoints on disk, read through their headers alone: no torch, no weights in memory."""
