"""tuneserve: from a chat data set and a base model to a proven OpenAI-compatible endpoint."""

__version__ = "0.1.0"
