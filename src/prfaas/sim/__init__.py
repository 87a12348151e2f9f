"""Discrete events around the real scheduler, planner and cache: what would have happened."""
