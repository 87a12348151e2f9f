"""Faults on purpose: a deployment of real processes, what is done to it, what its clients see."""
