"""EmulatedEngine: an engine without an accelerator: real bytes, a profile's times, no torch."""

from prfaas.engine.emulated.engine import EmulatedEngine, EmulatedModel
from prfaas.engine.emulated.pace import Scales, scaled_spec

__all__ = ["EmulatedEngine", "EmulatedModel", "Scales", "scaled_spec"]
