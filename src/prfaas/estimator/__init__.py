"""Times that have not been measured, estimated from counted work and fitted constants."""
