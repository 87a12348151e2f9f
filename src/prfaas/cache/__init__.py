"""Hybrid prefix cache: block hashes, the pool of one host, the index over all of them."""
