"""Admission of a tenant's requests: tokens per minute, requests in flight, bytes of bodies, and
prompt tokens that wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.errors import RequestError
from prfaas.gateway.tenants import Tenants
from prfaas.gateway.token_rates import BYTES_PER_TOKEN


class AdmittedRequest:
    """What one request has taken of its tenant's limits. It is given back when `admit` ends."""

    def __init__(self, tenants: Tenants, tenant: str) -> None:
        self._tenants = tenants
        self._tenant = tenant
        self._nbytes = 0
        self._charged_bytes = 0
        self._tokens = 0
        self._requests = 1

    def check_body(self, nbytes: int) -> None:
        """Raises `RequestError` for a body that the tenant could not send even alone. Called with
        the announced length, too: the first bytes of such a body may already be too many beside
        other bodies, and the client would be told to try again."""
        limit = self._tenants.body_bytes.most(self._tenant)
        if nbytes > limit.value:
            raise RequestError(
                413,
                "body_too_large",
                f"the request body is larger than {limit.value} bytes, which is all that tenant "
                f"{self._tenant!r} may have in flight ({limit.setting})",
            )

    def add_bytes(self, nbytes: int) -> None:
        """So many more bytes of the body have arrived. Raises `RequestError`."""
        self.check_body(self._nbytes + nbytes)
        self._tenants.token_rates.charge(self._tenant, nbytes / BYTES_PER_TOKEN)
        self._tenants.body_bytes.take(self._tenant, nbytes)
        self._nbytes += nbytes
        self._charged_bytes += nbytes

    def count_read(self, nbytes: int) -> None:
        """So many bytes of the body have been read, after decompression. They count like bytes that
        arrive, and no byte counts twice: of the two sizes, the larger one is charged. Reading is
        work also when the request is refused or the client leaves, so this may be called after the
        end."""
        more = nbytes - self._charged_bytes
        if more > 0:
            self._tenants.token_rates.charge(self._tenant, more / BYTES_PER_TOKEN)
            self._charged_bytes = nbytes

    def add_prompts(self, prompts: int, most: int) -> int:
        """A request with several prompts counts as so many requests as are under way at once. It
        never has more under way than its tenant may have; the others start later. Returns the
        number, at most `most`. Raises `RequestError`."""
        limits = (self._tenants.in_flight, self._tenants.waiting)
        allowed = min(limit.most(self._tenant).value for limit in limits)
        parallel = max(1, min(prompts, most, allowed))
        if parallel > 1:
            self._tenants.in_flight.take(self._tenant, parallel - 1)
        self._requests = parallel
        return parallel

    def begin_wait(self, prompt_tokens: int) -> None:
        """The request has a prompt and waits for its first token. Raises `RequestError`."""
        more = prompt_tokens - self._charged_bytes / BYTES_PER_TOKEN
        self._tenants.token_rates.charge(self._tenant, max(0.0, more))
        queued = self._tenants.queued_tokens
        if not queued.used(self._tenant):
            # A request that is alone would never find more room than now.
            prompt_tokens = min(prompt_tokens, queued.most(self._tenant).value)
        queued.take(self._tenant, prompt_tokens)
        self._tokens = prompt_tokens

    def end_wait(self) -> None:
        """The request has its first token, or will not have one."""
        if self._tokens:
            self._tenants.queued_tokens.release(self._tenant, self._tokens)
            self._tokens = 0

    def end(self) -> None:
        self.end_wait()
        if self._nbytes:
            self._tenants.body_bytes.release(self._tenant, self._nbytes)
            self._nbytes = 0
        self._tenants.in_flight.release(self._tenant, self._requests)


@contextmanager
def admit(tenants: Tenants, tenant: str) -> Iterator[AdmittedRequest]:
    """A request of the tenant is in flight for the time of the block. Raises `RequestError`, before
    a byte of the body is read, when the tenant or all tenants together have too many."""
    tenants.token_rates.check(tenant)
    tenants.in_flight.take(tenant)
    admitted = AdmittedRequest(tenants, tenant)
    try:
        yield admitted
    finally:
        admitted.end()
