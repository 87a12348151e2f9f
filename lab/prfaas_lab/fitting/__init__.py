"""Fits the constants of `prfaas.estimator` to published and measured times (docs/estimates.md)."""
