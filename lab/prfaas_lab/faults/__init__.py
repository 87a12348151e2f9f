"""Fault injection: a deployment of real processes, faults that strike it, and what clients see."""
