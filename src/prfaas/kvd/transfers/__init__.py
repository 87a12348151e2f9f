"""Transfers of KV between kvds: what must be sent, what was received, and its commit."""
