"""Prefill-as-a-Service: long prefills on a remote cluster, KV cache back over ordinary Ethernet."""

__version__ = "0.1.0"
