"""Configuration: the deployment file, the host file, and the strict reader of both."""

from prfaas.config.deployment import Deployment
from prfaas.config.deployment_file import load_deployment, parse_deployment

__all__ = ["Deployment", "load_deployment", "parse_deployment"]
