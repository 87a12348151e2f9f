"""Runs of deployments that only benchmarks make."""
