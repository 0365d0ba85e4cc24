"""Prefect tasks: one stage each."""
