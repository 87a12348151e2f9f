"""The deployment file and how it is read."""

from prfaas.config.deployment import Deployment, load_deployment, parse_deployment

__all__ = ["Deployment", "load_deployment", "parse_deployment"]
