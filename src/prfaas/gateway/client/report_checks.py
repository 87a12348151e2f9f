"""What a member may send: limits of a kvd's report and event pages, and of numbers in general.

The contracts (`contracts/kvd_api.py`) fix the types. A number of the right type may still be below
zero or have a thousand digits, and a name may have ten thousand characters. Such values would reach
routing, the log and `/prfaas/v1/state`. Everything here raises `MalformedResponse`, whose message
names the field. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from prfaas.config.address import parse_address, parse_peer_url
from prfaas.contracts.kvd_api import (
    LATE_WINDOW_S,
    MAX_GROUPS,
    MAX_POOLS,
    EventPage,
    GroupShape,
    KvdReport,
    PoolReport,
)
from prfaas.errors import InputError, MalformedResponse
from prfaas.types import CANONICAL, Form, NodeId

LARGEST_INT = 2**53  # JSON readers in other languages have no larger exact integers
LARGEST_FLOAT = 1e18
LONGEST_TEXT = 512
LONGEST_NAME = 128
LONGEST_EVENT_NAME = LONGEST_NAME + len(f"/{CANONICAL}")  # of a node's second pool
LONGEST_HASH = 64  # bytes
LARGEST_BLOCK = 1 << 20  # tokens
LARGEST_PAGE = 1 << 30  # bytes
MOST_PAGES = 1 << 33  # with the largest page, their bytes are a 64-bit number
# Entries of each collection. An engine that restarts leaves its name in `next_seq`.
MOST_ENTRIES = {"links": 1024, "next_seq": 4096, "layers": 4096}
MOST_OTHER_ENTRIES = 256


def check_report(report: KvdReport) -> KvdReport:
    """Returns the report. Raises `MalformedResponse` when a value is impossible."""
    try:
        _check(report, "")
        _check_name(report.node, "node")
        for name in report.next_seq:
            _check_name(name, "next_seq", LONGEST_EVENT_NAME)
        parse_address(report.data_address, "data_address")
        for number, engine in enumerate(report.engines):
            _check_name(engine.engine_id, f"engines.{number}.engine_id")
            if engine.url is not None:
                parse_peer_url(engine.url, f"engines.{number}.url")
        if report.late_s > 2 * LATE_WINDOW_S:
            raise InputError(f"is {report.late_s:g} of {LATE_WINDOW_S:g} seconds", where="late_s")
        _check_pools(report)
    except InputError as error:
        raise MalformedResponse(f"malformed report: {error}") from None
    return report


def check_page(page: EventPage, name: NodeId) -> EventPage:
    """Returns the page of events of `name`. Raises `MalformedResponse` when a value is impossible,
    or when the page or an event is of another node."""
    try:
        if page.node != name:
            raise InputError(f"is not {name}", where="node")
        _check(page.next_seq, "next_seq")
        _check(page.instance, "instance")
        for event in page.events:
            if event.node != name:
                raise InputError(f"is not {name}", where="events.node")
            if not 0 <= event.seq < page.next_seq:
                raise InputError("is not below next_seq", where="events.seq")
            _check(event.group, "events.group")
            _check(event.block_tokens, "events.block_tokens")
            _check_hashes(event.hashes, "events.hashes")
        if len(page.snapshot or {}) > MAX_GROUPS:
            raise InputError(f"has more than {MAX_GROUPS} groups", where="snapshot")
        for group, hashes in (page.snapshot or {}).items():
            _check(group, "snapshot")
            _check_hashes(hashes, "snapshot")
    except InputError as error:
        raise MalformedResponse(f"malformed page of events: {error}") from None
    return page


def second_pool_name(node: NodeId, form: Form) -> NodeId:
    """The name of the cache events of a node's second pool."""
    return NodeId(f"{node}/{form}")


def count(value: Any, where: str, largest: int = LARGEST_INT) -> int:
    """`value` where it is a whole number from 0 to `largest`."""
    if type(value) is not int or not 0 <= value <= largest:
        raise MalformedResponse(f"{where} is not a whole number from 0 to {largest}")
    return value


def _check(value: Any, where: str) -> None:
    """Checks every number and text in a message, however deep."""
    match value:
        case None | bool():
            pass
        case int():
            if not 0 <= value <= LARGEST_INT:
                raise InputError(f"is not from 0 to {LARGEST_INT}", where=where)
        case float():
            if not 0 <= value <= LARGEST_FLOAT:  # also refuses NaN
                raise InputError(f"is not from 0 to {LARGEST_FLOAT:g}", where=where)
        case str():
            if len(value) > LONGEST_TEXT or not value.isprintable():
                raise InputError(
                    f"is not one line of at most {LONGEST_TEXT} characters", where=where
                )
        case msgspec.Struct():
            for field in value.__struct_fields__:
                _check(getattr(value, field), f"{where}.{field}" if where else field)
        case dict():
            _check_size(value, where)
            for key, item in value.items():
                _check(key, where)
                _check(item, where)
        case tuple():
            _check_size(value, where)
            for number, item in enumerate(value):
                _check(item, f"{where}.{number}")
        case _:
            raise InputError("has an unexpected type", where=where)


def _check_size(value: Collection[Any], where: str) -> None:
    most = MOST_ENTRIES.get(where.rpartition(".")[2], MOST_OTHER_ENTRIES)
    if len(value) > most:
        raise InputError(f"has {len(value)} entries, and at most {most} are allowed", where=where)


def _check_name(name: str, where: str, longest: int = LONGEST_NAME) -> None:
    if not 0 < len(name) <= longest or " " in name or not name.isprintable():
        raise InputError(f"is not a name of 1 to {longest} characters without spaces", where=where)


def _check_pools(report: KvdReport) -> None:
    if report.pool is None:
        if report.more_pools:
            raise InputError("has pools, and there is no first one", where="more_pools")
        return
    if len(report.pools) > MAX_POOLS:
        raise InputError(f"has more than {MAX_POOLS - 1} pools", where="more_pools")
    if report.pool.name not in ("", report.node):
        raise InputError(f"is not {report.node}", where="pool.name")
    _check_pool(report.pool, "pool")
    for number, pool in enumerate(report.more_pools):
        where = f"more_pools.{number}"
        _check_pool(pool, where)
        _check_second(report.pool, pool, report.node, where)


def _check_pool(pool: PoolReport, where: str) -> None:
    _check_block(pool.block_tokens, f"{where}.block_tokens")
    _check_block(pool.compat.block_tokens, f"{where}.compat.block_tokens")
    _check_groups(pool.groups, f"{where}.groups")
    _check_pages(pool, where)


def _check_second(first: PoolReport, pool: PoolReport, node: NodeId, where: str) -> None:
    """A second pool has the same model in the other form, and a name that no other member has."""
    if pool.compat.form == first.compat.form:
        raise InputError(f"is a second {pool.compat.form} form", where=f"{where}.compat.layout")
    for field in ("model", "revision"):
        mine, firsts = getattr(pool.compat, field), getattr(first.compat, field)
        if mine != firsts:
            raise InputError(
                f"is {mine}, and {firsts} in the first pool", where=f"{where}.compat.{field}"
            )
    name = second_pool_name(node, pool.compat.form)
    if pool.name != name:
        raise InputError(f"is not {name}", where=f"{where}.name")


def _check_block(tokens: int, where: str) -> None:
    if not 1 <= tokens <= LARGEST_BLOCK:
        raise InputError(f"is not from 1 to {LARGEST_BLOCK}", where=where)


def _check_groups(groups: tuple[GroupShape, ...], where: str) -> None:
    if not groups or len({group.name for group in groups}) < len(groups):
        raise InputError("has no groups, or two of the same name", where=where)
    for group in groups:
        if group.kind == "window" and not group.window:
            raise InputError(f"{group.name} has a window of 0 tokens", where=where)


def _check_pages(pool: PoolReport, where: str) -> None:
    if pool.page_bytes > LARGEST_PAGE:
        raise InputError(f"is more than {LARGEST_PAGE}", where=f"{where}.page_bytes")
    used = pool.occupancy
    if max(used.capacity_pages or 0, used.used_pages, used.idle_pages) > MOST_PAGES:
        raise InputError(f"has more than {MOST_PAGES} pages", where=f"{where}.occupancy")


def _check_hashes(hashes: tuple[bytes, ...], where: str) -> None:
    if not all(0 < len(name) <= LONGEST_HASH for name in hashes):
        raise InputError(f"has a hash that is not of 1 to {LONGEST_HASH} bytes", where=where)
