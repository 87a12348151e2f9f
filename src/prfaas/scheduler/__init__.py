"""Short-term decisions. Pure: no clock, no socket; the gateway and the simulator call the same."""
