"""Moves named byte ranges over many TCP connections (paper, section 3.3).

This package has no notion of blocks, hashes or tensors: segments have names and sizes, and the
owners of memory provide the buffers.
"""
