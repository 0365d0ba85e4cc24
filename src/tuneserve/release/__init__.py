"""Serve a model behind a stable address, and switch models without losing a request."""
