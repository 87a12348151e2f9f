"""The kvd's OpenAPI 3.1 document, generated from the structs of `contracts/kvd_api.py`."""

from __future__ import annotations

from prfaas.contracts.kvd_api import (
    AbortTransfer,
    ClaimPlanning,
    EventPage,
    KvdErrorBody,
    KvdReport,
    MatchPrefix,
    OpenTransfer,
    PlanningLease,
    PlanningRecord,
    PrefixMatch,
    PrefixPulled,
    ProofOfMembership,
    ProveMembership,
    PullPrefix,
    PushPrefix,
    PushStarted,
    PutRecord,
    RecordPut,
    Role,
    SetRole,
    TransferStatus,
)
from prfaas.contracts.trace_api import TRACE_ID_PATTERN, TRACES_PATH, ProcessSpans
from prfaas.service.openapi import JSON, TEXT, ApiDocument, parameter
from prfaas.service.probes import PROBE_PATHS
from prfaas.types import Grant, NotNow

# Probes have no key, the document has no state, and a kvd proves itself before it is sent the key.
OPEN_PATHS = PROBE_PATHS | {"/health", "/openapi.json", "/v1/prove"}
_REASONS = {
    400: "The request is invalid; the message names the field.",
    401: "The member key is missing or not valid.",
    403: "KV must not be sent to or pulled from this host.",
    404: "The transfer, or the record, is not known here, or the id is not one.",
    408: "The body did not arrive in time.",
    409: "The engine does not match, the transfer has ended, or the role was changed meanwhile.",
    413: "The body is too large.",
    502: "Another kvd failed.",
    503: "The bodies of all requests are too large together, or this kvd is not ready.",
}
_READING = (400, 408, 413, 503)  # of every request with a body


def openapi(*, with_keys: bool) -> bytes:
    """`with_keys`: the kvd has a member key."""
    kinds = (OpenTransfer, Grant, NotNow, TransferStatus, AbortTransfer, MatchPrefix, PrefixMatch)
    more = (PullPrefix, PrefixPulled, PushPrefix, PushStarted, KvdReport, EventPage, Role, SetRole)
    others = (ProveMembership, ProofOfMembership, ClaimPlanning, PlanningLease, ProcessSpans)
    records = (PutRecord, RecordPut, PlanningRecord)
    document = ApiDocument("prfaas kvd", (*kinds, *more, *others, *records), KvdErrorBody, _REASONS)
    ref, add = document.ref, document.add
    keyed = (401,) if with_keys else ()
    reading = (*keyed, *_READING)
    transfer_id = parameter("id", {"type": "string", "minLength": 1}, where="path")
    wait_s = parameter("wait_s", {"type": "number"}, description="Longest wait; at most 60 s.")

    def post(
        path: str, summary: str, body: type, *answers: type, errors: tuple[int, ...] = ()
    ) -> None:
        schemas = [ref(kind) for kind in answers]
        answer = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        add(
            "post",
            path,
            summary,
            {JSON: answer},
            body=ref(body),
            errors=(*reading, *errors),
            parameters=[transfer_id] if "{id}" in path else (),
        )

    post(
        "/v1/open",
        "Reserves memory for a transfer.",
        OpenTransfer,
        Grant,
        NotNow,
        errors=(409,),
    )
    add(
        "get",
        "/v1/transfers/{id}",
        "The status of a transfer; with wait_s, after its commit or failure.",
        {JSON: ref(TransferStatus)},
        errors=(*keyed, 400, 404),
        parameters=[transfer_id, wait_s],
    )
    post(
        "/v1/transfers/{id}/abort",
        "Aborts a transfer, unless an engine has attached it.",
        AbortTransfer,
        TransferStatus,
        errors=(404,),
    )
    match = "How much of a prefix is in the pool."
    post("/v1/match", match, MatchPrefix, PrefixMatch, errors=(409,))
    pull = "Copies a prefix from another kvd to this one."
    post("/v1/pull", pull, PullPrefix, PrefixPulled, NotNow, errors=(403, 409, 502))
    push = "Sends a prefix to another kvd."
    post("/v1/push", push, PushPrefix, PushStarted, NotNow, errors=(403, 409, 502))
    add(
        "get",
        "/v1/stats",
        "The kvd's report.",
        {JSON: ref(KvdReport)},
        errors=keyed,
        parameters=[parameter("check", {"type": "string"}, description="Verify the pool first.")],
    )
    add(
        "get",
        "/v1/events",
        "Cache events from a number on, or a snapshot.",
        {JSON: ref(EventPage)},
        errors=(*keyed, 400),
        parameters=[
            parameter("node", {"type": "string"}),
            parameter("since", {"type": "integer"}, description="-1 requests a snapshot."),
            wait_s,
        ],
    )
    add("get", "/v1/role", "The role of this host.", {JSON: ref(Role)}, errors=keyed)
    add(
        "post",
        "/v1/role",
        "Sets the role, when the epoch is the current one and no later planner has the lease.",
        {JSON: ref(Role)},
        body=ref(SetRole),
        errors=reading,
        others={409: ref(Role)},
    )
    planning = "Claims, renews or gives up the planning lease; tells which gateway has it."
    post("/v1/planning", planning, ClaimPlanning, PlanningLease)
    add(
        "get",
        "/v1/records",
        "A planning record: the plan, or an order to drain a cluster.",
        {JSON: ref(PlanningRecord)},
        errors=(*keyed, 404),
        parameters=[parameter("name", {"type": "string"})],
    )
    put = (
        "Keeps a planning record, unless a later version is kept or a later planner has the lease."
    )
    post("/v1/records", put, PutRecord, RecordPut)
    add(
        "post",
        "/v1/prove",
        "Proves that this kvd has the member key.",
        {JSON: ref(ProofOfMembership)},
        body=ref(ProveMembership),
        errors=(*_READING, 409),
    )
    trace_id = {"type": "string", "pattern": f"^{TRACE_ID_PATTERN}$"}
    add(
        "get",
        f"{TRACES_PATH}{{trace_id}}",
        "The spans of a trace that this kvd still has.",
        {JSON: ref(ProcessSpans)},
        errors=(*keyed, 404),
        parameters=[parameter("trace_id", trace_id, where="path")],
    )
    add("get", "/metrics", "Prometheus metrics.", {TEXT: {"type": "string"}}, errors=keyed)
    document.add_common(health={TEXT: {"type": "string"}})
    return document.encode(with_keys=with_keys, open_paths=OPEN_PATHS)
