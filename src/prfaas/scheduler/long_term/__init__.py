"""Long-term re-optimisation: observed traffic, new plans, corrected profiles."""
