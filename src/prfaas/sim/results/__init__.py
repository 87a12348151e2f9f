"""What a simulated run measures and reports."""
