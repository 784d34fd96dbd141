"""Where embeddings are kept besides the pool."""
