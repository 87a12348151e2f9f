"""vLLM's caches: their groups and blocks, and how they are copied to and from pages in either form."""
