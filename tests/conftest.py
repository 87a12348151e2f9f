from __future__ import annotations

from hypothesis import settings

# The same examples for everybody, and no verdict on how fast a busy machine is. New ground is
# broken by `make fuzz` and by changing code, not by chance in somebody else's run.
settings.register_profile("prfaas", derandomize=True, deadline=None)
settings.load_profile("prfaas")
