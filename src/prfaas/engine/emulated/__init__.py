"""EmulatedEngine: an accelerator that is not there. Real bytes, a profile's times, no torch."""

from prfaas.engine.emulated.engine import EmulatedEngine
from prfaas.engine.emulated.pace import Scales, scaled_spec

__all__ = ["EmulatedEngine", "Scales", "scaled_spec"]
