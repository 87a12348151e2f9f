"""The request fields that a node accepts, from the structs that check requests. The node publishes
them in its model card: a gateway refuses every other field before it opens a transfer. Some of them
are accepted with a few values only, which the node's `render` path checks. Pure.
"""

from __future__ import annotations

from prfaas.contracts.openai_fields import Endpoint
from prfaas.node.known_fields import (
    FIXED_IN_CHAT,
    FIXED_IN_COMPLETIONS,
    WITHOUT_EFFECT,
)
from prfaas.node.request_schema import ChatOptions, Completion
from prfaas.text import Chat

# Served with every value that its type allows.
SERVED: dict[Endpoint, frozenset[str]] = {
    "completions": frozenset(Completion.__struct_fields__),
    "chat": frozenset({*ChatOptions.__struct_fields__, *Chat.__struct_fields__}),
}
# Accepted with these values and with null.
FIXED: dict[Endpoint, dict[str, tuple[object, ...]]] = {
    "completions": FIXED_IN_COMPLETIONS,
    "chat": FIXED_IN_CHAT,
}


def served_fields() -> dict[Endpoint, list[str]]:
    """By endpoint, sorted. An emulated engine has them, too: many clients send default values,
    which change nothing, and it refuses the other ones itself."""
    return {
        endpoint: sorted(served | FIXED[endpoint].keys() | WITHOUT_EFFECT)
        for endpoint, served in SERVED.items()
    }
