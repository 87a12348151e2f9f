"""Finds the best nodes without looking at all of them: ordered nodes, and sets of nodes as masks."""
