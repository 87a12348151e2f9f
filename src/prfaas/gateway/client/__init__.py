"""The gateway's clients of nodes and kvds."""
