"""Logging, configured here and nowhere else: to stderr, at the level that PRFAAS_LOG names."""

from __future__ import annotations

import logging
import os

from prfaas.errors import InputError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def configure_logging() -> None:
    """For commands that keep running. The log level is the only thing read from the environment."""
    level = os.environ.get("PRFAAS_LOG", "INFO").upper()
    if level not in _LEVELS:
        raise InputError(f"{level!r}", where="PRFAAS_LOG", fix=f"use one of: {', '.join(_LEVELS)}")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
