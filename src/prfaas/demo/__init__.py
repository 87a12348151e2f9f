"""The parts of `prfaas demo`, the disturbance by the machine, and the checks of the results."""
