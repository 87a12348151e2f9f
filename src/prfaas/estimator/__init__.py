"""Times that nobody has measured: estimated from counted work and fitted efficiencies."""
