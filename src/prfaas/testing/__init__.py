"""Doubles that ship with the product, so that users test the way the project does."""

from prfaas.testing.clock import FakeClock

__all__ = ["FakeClock"]
