"""How this host sends fastest: `choose_sending` measures it once, when a process starts."""

from prfaas.transport.host_speed.decision import Sending
from prfaas.transport.host_speed.measurement import choose_sending

__all__ = ["Sending", "choose_sending"]
