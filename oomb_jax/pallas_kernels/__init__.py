"""One folder per operation; each is useful alone and knows nothing of the engine."""
