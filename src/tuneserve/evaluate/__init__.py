"""Stage `evaluate`: held-out losses of base, adapter and merged model; answers of the base."""
