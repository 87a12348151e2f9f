"""vLLM's caches: their groups and blocks, and the copies to and from pages in either form."""
