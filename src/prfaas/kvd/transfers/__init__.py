"""Transfers of KV between kvds: what is owed, sent, received and committed."""
