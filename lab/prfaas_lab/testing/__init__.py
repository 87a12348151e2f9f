"""Test doubles, networks with loss, vLLM servers and engines without a server, for tests and
benchmarks."""

from prfaas_lab.testing.clock import FakeClock

__all__ = ["FakeClock"]
