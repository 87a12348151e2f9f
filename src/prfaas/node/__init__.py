"""A node: an engine with vLLM's HTTP API, attached to its kvd. It prefills and decodes."""
