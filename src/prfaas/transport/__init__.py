"""Named byte ranges over many TCP connections (paper, section 3.3). Knows nothing of blocks, hashes
or tensors: segments have names and sizes, buffers come from their owners."""
