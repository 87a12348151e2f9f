"""The gateway's front: OpenAI's API over HTTP. Reads, checks and tokenises requests, hands them to
a `Backend`, and relays the decode engine's answer. Knows nothing of clusters or routes."""

from prfaas.gateway.api.app import GatewayApi, Limits

__all__ = ["GatewayApi", "Limits"]
