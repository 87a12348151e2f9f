"""Long-term re-optimisation: the traffic seen, new plans, profiles corrected by observation."""
