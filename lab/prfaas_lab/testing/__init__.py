"""Test doubles, networks with loss, and vLLM servers, for tests and benchmarks."""

from prfaas_lab.testing.clock import FakeClock

__all__ = ["FakeClock"]
