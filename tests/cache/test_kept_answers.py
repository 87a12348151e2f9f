"""Answers in the pool: pages that are set aside, prefixes that must be there, and eviction."""

from __future__ import annotations

from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.types import NotNow
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool

SPEC = SPECS["hybrid"]
LAYOUT = layout_of(SPEC)
BLOCK_PAGES, STATE_PAGES = LAYOUT.pages(0), LAYOUT.pages(1)
PROMPT = (1,) * 2 * BLOCK
ANSWERED = PROMPT + (2,) * 3 * BLOCK
ANSWER_PAGES = 3 * BLOCK_PAGES + STATE_PAGES
PROMPT_PAGES = 2 * BLOCK_PAGES + STATE_PAGES


def serve(pool: HybridPrefixPool, prompt: tuple[int, ...], now: float = 0.0) -> None:
    lease = pool.reserve(hashes_of(prompt), len(prompt), now=now)
    assert isinstance(lease, Lease)
    pool.commit(lease.id, now)
    pool.release(lease.id, now)


def answer(pool: HybridPrefixPool, tokens: tuple[int, ...], first: int) -> Lease | NotNow:
    return pool.reserve_answer(hashes_of(tokens), len(tokens), first_token=first, now=1.0)


def keep(pool: HybridPrefixPool, tokens: tuple[int, ...], first: int) -> bool:
    lease = answer(pool, tokens, first)
    assert isinstance(lease, Lease), lease
    kept = pool.commit(lease.id, 1.0)
    assert pool.release(lease.id, 1.0)
    pool.check()
    return kept


def made(pages: int, aside: int) -> HybridPrefixPool:
    pool = make_pool(SPEC, pages=pages + aside, evict="cost")
    pool.set_aside(aside)
    return pool


def test_the_next_prompt_resumes_where_the_answer_ended() -> None:
    pool = made(100, 10)
    serve(pool, PROMPT)
    assert keep(pool, ANSWERED, len(PROMPT))
    assert pool.match(hashes_of(ANSWERED + (3,) * BLOCK)).tokens == len(ANSWERED)
    assert pool.stats.kept_answers == 1
    assert pool.occupancy().leases == 0


def test_an_answer_that_is_known_needs_no_page() -> None:
    pool = made(100, 10)
    serve(pool, PROMPT)
    assert keep(pool, ANSWERED, len(PROMPT))
    lease = answer(pool, ANSWERED, len(PROMPT))
    assert isinstance(lease, Lease) and lease.new_bytes == 0
    assert lease.match.tokens == len(ANSWERED)


def test_an_answer_that_is_written_takes_nothing_from_a_grant() -> None:
    """The grant needs every page that is not set aside."""
    pool = made(PROMPT_PAGES + BLOCK_PAGES, ANSWER_PAGES)
    serve(pool, PROMPT)
    lease = answer(pool, ANSWERED, len(PROMPT))
    assert isinstance(lease, Lease)
    other = (5,) * 3 * BLOCK
    granted = pool.reserve(hashes_of(other), len(other), now=1.0)
    assert isinstance(granted, Lease)
    pool.check()
    # The grant has evicted the prompt, so that the answer is of no use any more.
    assert not pool.commit(lease.id, 1.0)
    assert pool.release(lease.id, 1.0)
    pool.check()
    assert pool.match(hashes_of(ANSWERED)).attention_tokens == 0
    assert pool.stats.kept_answers == 0


def test_without_pages_that_are_set_aside_nothing_is_kept() -> None:
    pool = made(100, 0)
    serve(pool, PROMPT)
    assert isinstance(answer(pool, ANSWERED, len(PROMPT)), NotNow)
    pool = made(100, 2 * ANSWER_PAGES - 1)
    serve(pool, PROMPT)
    first = answer(pool, ANSWERED, len(PROMPT))
    assert isinstance(first, Lease)
    assert isinstance(answer(pool, PROMPT + (7,) * 3 * BLOCK, len(PROMPT)), NotNow)
    pool.release(first.id, 2.0)
    assert isinstance(answer(pool, PROMPT + (7,) * 3 * BLOCK, len(PROMPT)), Lease)
    pool.check()


def test_an_answer_whose_prompt_is_gone_is_refused() -> None:
    pool = made(100, 10)
    refused = answer(pool, ANSWERED, len(PROMPT))
    assert isinstance(refused, NotNow) and "first 8 tokens" in refused.reason
    assert pool.occupancy().used_pages == 0


def test_what_is_worth_less_makes_room() -> None:
    """The state at the end of the prompt is superseded by the one at the end of the answer."""
    pool = made(PROMPT_PAGES + 3 * BLOCK_PAGES, ANSWER_PAGES)
    serve(pool, PROMPT)
    assert keep(pool, ANSWERED, len(PROMPT))
    assert pool.match(hashes_of(ANSWERED)).tokens == len(ANSWERED)
    assert pool.match(hashes_of(PROMPT)).tokens == 0
    assert pool.occupancy().used_pages <= PROMPT_PAGES + 3 * BLOCK_PAGES


def test_an_answer_that_is_worth_least_goes_itself() -> None:
    """Others are in use, so that only the answer can make room for itself."""
    pool = made(PROMPT_PAGES, ANSWER_PAGES)
    serve(pool, PROMPT)
    reader = pool.pin(hashes_of(PROMPT), now=0.5)
    assert isinstance(reader, Lease) and reader.match.tokens == len(PROMPT)
    assert keep(pool, ANSWERED, len(PROMPT))
    assert pool.match(hashes_of(ANSWERED)).tokens == len(PROMPT)
    assert pool.occupancy().used_pages == PROMPT_PAGES
