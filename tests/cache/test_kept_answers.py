"""Answers in the pool: pages that are set aside, prefixes that must be there, and eviction."""

from __future__ import annotations

import os
import tempfile

from prfaas.cache.lease import Lease
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.ssd import SpillFile
from prfaas.types import NotNow
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool, prepare_now

SPEC = SPECS["hybrid"]
LAYOUT = layout_of(SPEC)
BLOCK_PAGES, STATE_PAGES = LAYOUT.pages(0), LAYOUT.pages(1)
PROMPT = (1,) * 2 * BLOCK
ANSWERED = PROMPT + (2,) * 3 * BLOCK
ANSWER_PAGES = 3 * BLOCK_PAGES + STATE_PAGES
PROMPT_PAGES = 2 * BLOCK_PAGES + STATE_PAGES
LATER = 1_000.0  # seconds: prefixes that were used at 0 are worth little by then


def serve(pool: HybridPrefixPool, prompt: tuple[int, ...], now: float = 0.0) -> None:
    lease = pool.reserve(hashes_of(prompt), len(prompt), now=now)
    assert isinstance(lease, Lease)
    pool.commit(lease.id, now)
    pool.release(lease.id, now)


def answer(pool: HybridPrefixPool, tokens: tuple[int, ...], first: int) -> Lease | NotNow:
    return pool.reserve_answer(hashes_of(tokens), len(tokens), first_token=first, now=LATER)


def keep(pool: HybridPrefixPool, tokens: tuple[int, ...], first: int) -> bool:
    lease = answer(pool, tokens, first)
    assert isinstance(lease, Lease), lease
    kept = pool.commit(lease.id, LATER)
    assert pool.release(lease.id, LATER)
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
    """An old prompt is evicted, and not the prompt that the answer belongs to."""
    pool = made(2 * PROMPT_PAGES, ANSWER_PAGES)
    old = (4,) * 4 * BLOCK
    serve(pool, PROMPT)
    serve(pool, old)
    serve(pool, PROMPT, now=100.0)
    lease = pool.reserve_answer(
        hashes_of(ANSWERED), len(ANSWERED), first_token=len(PROMPT), now=100.0
    )
    assert isinstance(lease, Lease)
    assert pool.commit(lease.id, 100.0) and pool.release(lease.id, 100.0)
    pool.check()
    assert pool.match(hashes_of(ANSWERED)).tokens == len(ANSWERED)
    assert pool.match(hashes_of(old)).tokens == 0


def test_an_answer_evicts_nothing_that_is_worth_more() -> None:
    """It saves the prefill of three blocks, and would take a prompt of five that was used just
    now. A long time later it is worth more."""
    pool = made(PROMPT_PAGES + 3 * BLOCK_PAGES, ANSWER_PAGES)
    other = (6,) * 5 * BLOCK
    serve(pool, other)
    serve(pool, PROMPT)
    refused = pool.reserve_answer(hashes_of(ANSWERED), len(ANSWERED), first_token=8, now=1.0)
    assert isinstance(refused, NotNow) and "worth less" in refused.reason
    assert pool.match(hashes_of(other)).tokens == len(other)
    assert pool.match(hashes_of(PROMPT)).tokens == len(PROMPT)
    assert keep(pool, ANSWERED, len(PROMPT))
    assert pool.match(hashes_of(other)).tokens == 0
    pool.check()


def test_an_answer_that_no_prompt_contains_goes_before_the_prompt() -> None:
    pool = made(PROMPT_PAGES + ANSWER_PAGES + STATE_PAGES, ANSWER_PAGES)
    serve(pool, PROMPT, now=LATER)
    assert keep(pool, ANSWERED, len(PROMPT))
    serve(pool, (6,) * 3 * BLOCK, now=LATER)
    assert pool.match(hashes_of(ANSWERED)).tokens == len(ANSWERED), "there was room"
    serve(pool, (7,) * 3 * BLOCK, now=LATER)
    assert pool.match(hashes_of(ANSWERED)).tokens == len(PROMPT)


def test_an_answer_that_a_prompt_contains_supersedes_the_end_of_the_prompt() -> None:
    pool = made(PROMPT_PAGES + ANSWER_PAGES + STATE_PAGES, ANSWER_PAGES)
    serve(pool, PROMPT, now=LATER)
    assert keep(pool, ANSWERED, len(PROMPT))
    reader = pool.pin(hashes_of(ANSWERED), now=LATER)
    assert isinstance(reader, Lease)
    pool.release(reader.id, LATER)
    serve(pool, (6,) * 3 * BLOCK, now=LATER)
    serve(pool, (7,) * 3 * BLOCK, now=LATER)
    assert pool.match(hashes_of(ANSWERED)).tokens == len(ANSWERED)
    assert pool.match(hashes_of(PROMPT)).tokens == 0
    pool.check()


def with_a_reader() -> HybridPrefixPool:
    """One page is free, and another prompt is in use."""
    pool = made(PROMPT_PAGES + 1, PROMPT_PAGES + 1)
    serve(pool, PROMPT)
    other = (6,) * 3 * BLOCK
    serve(pool, other)
    reader = pool.pin(hashes_of(other), now=0.5)
    assert isinstance(reader, Lease) and reader.match.tokens == len(other)
    assert pool.occupancy().used_pages == 2 * PROMPT_PAGES + 1
    return pool


def test_the_prompt_of_an_answer_is_not_evicted_for_it() -> None:
    """Only the state at the end of the prompt makes room: the answer needs the rest."""
    pool = with_a_reader()
    tokens = PROMPT + (2,) * BLOCK
    assert keep(pool, tokens, len(PROMPT))
    assert pool.match(hashes_of(tokens)).tokens == len(tokens)
    assert pool.match(hashes_of(PROMPT)).tokens == 0


def test_an_answer_that_would_need_the_pages_of_its_prompt_is_refused() -> None:
    pool = with_a_reader()
    refused = answer(pool, ANSWERED, len(PROMPT))
    assert isinstance(refused, NotNow) and "no room" in refused.reason
    pool.check()
    assert pool.match(hashes_of(PROMPT)).tokens == len(PROMPT)


def test_prefixes_use_the_pages_that_no_answer_needs() -> None:
    pool = made(PROMPT_PAGES, PROMPT_PAGES)
    other = (6,) * 2 * BLOCK
    serve(pool, PROMPT)
    serve(pool, other)
    assert pool.occupancy().used_pages == 2 * PROMPT_PAGES == pool.occupancy().capacity_pages
    assert pool.match(hashes_of(PROMPT)).tokens == pool.match(hashes_of(other)).tokens == 2 * BLOCK


def test_readers_may_use_all_pages() -> None:
    """They need no new page, so that they are not refused; an answer is."""
    pool = made(PROMPT_PAGES, PROMPT_PAGES)
    other = (6,) * 2 * BLOCK
    serve(pool, PROMPT)
    serve(pool, other)
    readers = [pool.pin(hashes_of(prompt), now=1.0) for prompt in (PROMPT, other)]
    assert all(isinstance(reader, Lease) for reader in readers)
    again = pool.reserve(hashes_of(PROMPT), len(PROMPT), now=1.0)
    assert isinstance(again, Lease) and again.new_bytes == 0
    assert isinstance(answer(pool, PROMPT + (2,) * BLOCK, len(PROMPT)), NotNow)
    pool.check()


FURTHER = ANSWERED + (3,) * BLOCK
OTHER = (8,) * BLOCK
# The conversation up to FURTHER, with the states after ANSWERED and FURTHER. One more page, so that
# OTHER needs the pages of one state.
CONVERSATION_PAGES = 6 * BLOCK_PAGES + 2 * STATE_PAGES + BLOCK_PAGES


def test_an_answer_that_was_found_and_whose_state_was_evicted_is_not_kept() -> None:
    """The pool had all of the answer when it ended, so that the engine writes nothing. Then the
    state after it is evicted, because the next turn supersedes it; the attention stays."""
    pool = made(CONVERSATION_PAGES, 0)
    serve(pool, ANSWERED)
    serve(pool, FURTHER)
    lease = answer(pool, ANSWERED, len(PROMPT))
    assert isinstance(lease, Lease) and lease.new_bytes == 0
    serve(pool, OTHER, now=2.0)
    found = pool.match(hashes_of(ANSWERED))
    assert (found.tokens, found.attention_tokens) == (0, len(ANSWERED))
    assert not pool.commit(lease.id, 3.0)
    assert pool.release(lease.id, 3.0)
    assert pool.stats.kept_answers == 0
    pool.check()


def test_an_answer_that_was_found_and_whose_state_the_ssd_lost_is_not_kept() -> None:
    """The same, with the state on SSD when the answer ends, and a file that cannot be read."""
    memory = os.memfd_create("pool")
    os.ftruncate(memory, CONVERSATION_PAGES * LAYOUT.page_bytes)
    arena = Arena(memory, LAYOUT.page_bytes, CONVERSATION_PAGES)
    os.close(memory)
    with tempfile.TemporaryFile() as file:
        ssd = SpillFile(file.fileno(), LAYOUT.page_bytes, 100)
        pool = make_pool(SPEC, pages=CONVERSATION_PAGES, evict="cost", arena=arena, ssd=ssd)
        serve(pool, ANSWERED)
        serve(pool, FURTHER)
        preparation = prepare_now(pool, hashes_of(OTHER), len(OTHER), now=1.0)
        assert preparation is not None
        preparation.end(1.0)
        assert pool.occupancy().spilled_units == 1
        lease = answer(pool, ANSWERED, len(PROMPT))
        assert isinstance(lease, Lease) and lease.new_bytes == 0
        file.truncate(0)
        reading = prepare_now(pool, hashes_of(ANSWERED), None, now=2.0)
        assert reading is not None
        reading.end(2.0)
        assert pool.stats.unreadable_blocks == 1
        assert pool.match(hashes_of(ANSWERED)).attention_tokens == len(ANSWERED)
        assert not pool.commit(lease.id, 3.0)
        assert pool.release(lease.id, 3.0)
        pool.check()
        assert pool.stats.kept_answers == 0 and pool.occupancy().leases == 0
    arena.close()
