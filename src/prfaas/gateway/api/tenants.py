"""Admission of a tenant's requests: tokens per minute, sequences in flight, bytes of bodies, and
prompt tokens that wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.errors import InputError, RequestError
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
        self._sequences = 1

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

    def add_sequences(self, prompts: int, n: int, most: int) -> int:
        """A request counts as so many sequences as are under way at once: `n` choices for each of
        its prompts. It never has more under way than its tenant may have; the other prompts start
        later. Returns the number of prompts, at most `most`. Raises `RequestError`, and
        `InputError` where the tenant may not have the choices of one prompt, even alone."""
        in_flight = self._tenants.in_flight
        limit = in_flight.most(self._tenant)
        if n > limit.value:
            raise InputError(
                f"{n} choices are more sequences than the {limit.value} that the tenant "
                f"{self._tenant!r} may have in flight ({limit.setting})",
                where="n",
                fix=f"send at most {limit.value}",
            )
        places = self._tenants.waiting.most(self._tenant).value
        parallel = max(1, min(prompts, most, places, limit.value // n))
        sequences = parallel * n
        if sequences > 1:
            in_flight.take(self._tenant, sequences - 1)
        self._sequences = sequences
        return parallel

    def begin_wait(self, prompt_tokens: int, n: int = 1) -> None:
        """The request has prompts and waits for its first token. Each of the `n` choices is a
        sequence with the tokens of its prompt. Raises `RequestError`."""
        tokens = prompt_tokens * n
        more = tokens - self._charged_bytes / BYTES_PER_TOKEN
        self._tenants.token_rates.charge(self._tenant, max(0.0, more))
        queued = self._tenants.queued_tokens
        if not queued.used(self._tenant):
            # A request that is alone would never find more room than now.
            tokens = min(tokens, queued.most(self._tenant).value)
        queued.take(self._tenant, tokens)
        self._tokens = tokens

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
        self._tenants.in_flight.release(self._tenant, self._sequences)


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
