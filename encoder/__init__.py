"""Pixels to embeddings. Knows nothing of caches, sockets or leases; this module imports nothing."""
