"""What must hold of every case that `live.play` has played. Each rule names what breaks it; none
says how fast anything is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TypeAlias

from prfaas.launch.request_outcomes import RequestOutcome
from tests.promises.live import Asked, Played, Run, remembers_drains, served_throughout
from tests.promises.stand_ins import expected_tokens

UNLOGGED_S = 2.0  # in which a gateway logs a request whose client has all of its answer
NAMED = ("completed", "rejected", "shed", "failed", "broken", "cancelled")
Rule: TypeAlias = Callable[[Played], Iterator[str]]


def broken_rules(played: Played) -> list[str]:
    """One line for each thing that must not be."""
    return [f"{rule.__name__}: {what}" for rule in RULES for what in rule(played)]


def every_accepted_request_ends_in_one_named_way(played: Played) -> Iterator[str]:
    """And client, log and metrics say the same."""
    told: dict[str, list[tuple[Run, RequestOutcome]]] = defaultdict(list)
    for run in played.runs:
        for line in run.lines:
            told[line.id].append((run, line))
    for one in played.asked:
        lines = told.pop(one.id, [])
        if len(lines) > 1:
            yield f"{one.id} has {len(lines)} log lines"
        found = lines[0][1].outcome if lines else "nothing"
        if one.end == "gone" and _met_outage(played, one):
            continue  # with its gateway, which may have logged its end before
        if not lines and _met_outage(played, one, UNLOGGED_S):
            continue  # it was killed between the end of the answer and its log line
        if one.end == "refused" and _met_outage(played, one):
            if lines:
                yield f"{one.id} was not accepted, and was logged as {found}"
        elif one.end == "cancelled" and (lines or not one.status):
            # The client may leave after the end, and before the gateway has read the request.
            if lines and found not in NAMED:
                yield f"{one.id} was logged as {found}"
        elif one.end not in NAMED:
            yield f"{one.id} ended for its client as {one.end or 'nothing'}: {one.problem}"
        elif found != one.end:
            yield f"{one.id} was {one.end} for its client ({one.problem}) and {found} in the log"
    for name in told:
        yield f"{name} was logged, and not sent"
    for run in played.runs:
        if not run.was_killed:
            logged = Counter(line.outcome for line in run.lines)
            if logged != run.counted():
                yield f"the log has {dict(logged)} and the metrics {dict(run.counted())}"


def nothing_is_left_behind(played: Played) -> Iterator[str]:
    """Nor forgotten."""
    yield from played.left


def a_home_with_a_live_node_is_served(played: Played) -> Iterator[str]:
    """Whatever else is lost, slow, cut off, flooded or drained."""
    serving = served_throughout(played.case)
    for one in played.asked:
        if one.home not in serving or one.end == "completed":
            continue
        if one.end == "rejected" and not one.is_valid:
            continue
        if one.end == "cancelled" and one.leaves_s is not None:
            continue
        if one.end in ("gone", "refused") and _met_outage(played, one):
            continue
        if one.end == "broken" and _decode_was_lost(played, one):
            continue
        yield f"{one.id} at {one.home} was {one.end}: {one.problem}"


def a_stream_breaks_with_its_decode_node_only(played: Played) -> Iterator[str]:
    for one in played.asked:
        if one.end == "broken" and not _decode_was_lost(played, one):
            yield f"{one.id} broke, and its decode node lived: {one.problem}"


def answers_are_those_of_one_engine(played: Played) -> Iterator[str]:
    for one in played.asked:
        expected = expected_tokens(one.prompt, one.max_tokens)
        if one.end == "completed" and one.tokens != expected:
            yield f"{one.id} has the tokens {one.tokens} and not {expected}"
        elif one.tokens != expected[: len(one.tokens)]:
            yield f"{one.id} begins with {one.tokens}, and not as {expected}"


def kv_of_a_transfer_without_commit_is_never_used(played: Played) -> Iterator[str]:
    yield from played.world.books.violations


def invalid_requests_are_refused_and_compute_nothing(played: Played) -> Iterator[str]:
    for one in played.asked:
        if one.is_valid:
            if one.end == "rejected":
                yield f"{one.id} was rejected: {one.problem}"
        elif one.end not in ("rejected", "cancelled", "gone", "refused"):
            yield f"{one.id} is invalid, and was {one.end}"
        elif played.world.books.of(one.id):
            yield f"{one.id} is invalid, and reached a node"


def a_drained_cluster_gets_nothing_new(played: Played) -> Iterator[str]:
    """Until its return is ordered, and also from gateways that have started since."""
    hosts = played.world.hosts
    for drain in played.drains:
        ends_s = drain.returned_s
        started = [run.started_s for run in played.runs if run.started_s > drain.followed_s]
        if started and not (drain.kept and remembers_drains(played.case)):
            ends_s = min([ends_s, *started])
        for one in played.asked:
            if drain.followed_s < one.sent_s and one.ended_s < ends_s:
                for work in played.world.books.of(one.id):
                    if hosts[work.host].cluster == drain.cluster:
                        yield f"{one.id} reached {work.host}, which is drained"


RULES: tuple[Rule, ...] = (
    every_accepted_request_ends_in_one_named_way,
    nothing_is_left_behind,
    a_home_with_a_live_node_is_served,
    a_stream_breaks_with_its_decode_node_only,
    answers_are_those_of_one_engine,
    kv_of_a_transfer_without_commit_is_never_used,
    invalid_requests_are_refused_and_compute_nothing,
    a_drained_cluster_gets_nothing_new,
)


def _met_outage(played: Played, one: Asked, later_s: float = 0.0) -> bool:
    """Whether no gateway of its home listened between its start and its end, or so much later."""
    until_s = one.ended_s + later_s
    return any(
        from_s <= until_s and one.sent_s <= to_s for from_s, to_s in played.outages(one.home)
    )


def _decode_was_lost(played: Played, one: Asked) -> bool:
    work = played.world.books.of(one.id)
    return any(each.kind == "decode" and each.end == "lost" for each in work)
