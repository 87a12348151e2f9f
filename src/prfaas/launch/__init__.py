"""Starts a deployment on this machine: its processes, their readiness, and their end."""
