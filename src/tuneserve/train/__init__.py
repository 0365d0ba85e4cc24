"""Stage `train`: an adapter from a dataset artifact and a base model."""
