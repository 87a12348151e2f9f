"""Studies of a deployment: files read into problems, sweeps, cases to simulate, saturation."""
