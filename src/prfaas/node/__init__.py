"""An engine behind vLLM's HTTP surface, attached to its kvd. Prefills and decodes."""
