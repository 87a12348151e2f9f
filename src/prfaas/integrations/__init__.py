"""Connectors for engines of other projects."""
