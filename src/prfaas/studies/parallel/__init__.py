"""Independent cases of a study, on many cores and machines."""
