"""The parts of OpenAI's API that more than one process reads or writes: usage, stream options and
errors. Fields that are not declared here are ignored on decoding, as OpenAI's servers do.

The gateway and the nodes each define which request fields they serve (`gateway.api.request_schema`,
`node.request_schema`): these sets differ on purpose.
"""

from __future__ import annotations

import msgspec

from prfaas.errors import InputError

# Of one request. vLLM has no limit of prompts, and one of 16,384 choices.
MAX_CHOICES = 64  # `n`: continuations of each prompt
MAX_PROMPTS = 256
MAX_TOTAL_CHOICES = 512  # continuations of all prompts
# Every generated character is compared with each of them. vLLM has no limits.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_024

# A gateway names the tenant of a request to its nodes with it, by an opaque tag: nodes divide what
# they share between tenants. Clients' own headers of this name are not passed on.
TENANT_HEADER = "X-Prfaas-Tenant"


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, in every event


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None when the engine does not report it."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details is not None else None


class UsageField(msgspec.Struct, frozen=True):
    """The `usage` field of a response body or of a stream event."""

    usage: Usage | None = None


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: Error


def check_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings that the field `stop` has. Raises InputError for those that no engine of a
    deployment gets."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(stops):
        raise InputError(
            f"{len(stops)} stop strings",
            where="stop",
            fix=f"send at most {MAX_STOPS}, none of them empty",
        )
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InputError(
            f"a stop string has {longest} characters",
            where="stop",
            fix=f"send at most {MAX_STOP_CHARACTERS} in each",
        )
    return stops
