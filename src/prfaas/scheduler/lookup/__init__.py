"""Finds the best nodes without a look at all of them: ranked nodes, and sets of nodes as masks."""
