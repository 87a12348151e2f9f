"""The scenes of `prfaas demo`, the disturbance of the machine, and the judgement of both."""
