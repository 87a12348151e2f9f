"""Named byte ranges over many TCP connections. Knows nothing of blocks, hashes or tensors."""
