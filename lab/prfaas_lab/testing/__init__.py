"""Test doubles that ship with the product, so that users can test as the project does."""

from prfaas.testing.clock import FakeClock

__all__ = ["FakeClock"]
