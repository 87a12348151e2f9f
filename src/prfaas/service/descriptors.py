"""The limit of open descriptors."""

from __future__ import annotations

import logging
import resource

_LOG = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Raises the soft limit of this process to the hard limit. Systems start processes with a soft
    limit of 1,024, for programs that use select(); a service has a descriptor for each request in
    flight, and another one for its call to a node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        _LOG.warning("the limit of open descriptors stays at %d: %s", soft, error)
