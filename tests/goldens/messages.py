"""Every message between processes and clients: its fields, and an encoded example.

A message is named by where it travels and by its type. An example has every field; a second one has
only the fields without a default, so that the defaults show where they are written. Messages that a
process exchanges with its own workers are not recorded: both sides are always of one version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from prfaas.cache.hashing import vllm_payloads
from prfaas.contracts import (
    gateway_api,
    kv_transfer_params,
    kvd_api,
    openai,
    readiness,
    trace_api,
)
from prfaas.gateway.api import request_schema as gateway_requests
from prfaas.gateway.console.deltas import Delta
from prfaas.gateway.console.feed import Opening
from prfaas.gateway.console.paths import PromptForm
from prfaas.kvd.engine_socket import messages as engine_socket
from prfaas.node import request_schema as node_requests
from prfaas.service.probes import Liveness, Readiness
from prfaas.text import Chat
from prfaas.text import tokenization as texts
from prfaas.transport import messages as transport
from prfaas.types import Grant, NotNow
from prfaas.wan.stats import RelayStats
from tests.goldens.canonical import Golden
from tests.goldens.schemas import described, example, structs_in

JSON: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "kvd_http": (
        kvd_api.KvdErrorBody,
        kvd_api.OpenTransfer,
        Grant,
        NotNow,
        kvd_api.TransferStatus,
        kvd_api.AbortTransfer,
        kvd_api.MatchPrefix,
        kvd_api.PrefixMatch,
        kvd_api.PullPrefix,
        kvd_api.PrefixPulled,
        kvd_api.PushPrefix,
        kvd_api.PushStarted,
        kvd_api.Role,
        kvd_api.SetRole,
        kvd_api.ClaimPlanning,
        kvd_api.PlanningLease,
        kvd_api.PutRecord,
        kvd_api.RecordPut,
        kvd_api.PlanningRecord,
        kvd_api.KvdReport,
        kvd_api.Heartbeat,
        kvd_api.ProveMembership,
        kvd_api.ProofOfMembership,
        kvd_api.EventPage,
    ),
    "gateway_http": (
        gateway_api.GatewayReport,
        gateway_api.SharedPlan,
        gateway_api.DrainOrder,
        gateway_api.SetDrain,
        trace_api.KeptRequests,
        trace_api.ProcessSpans,
        trace_api.FollowedRequest,
        Opening,
        Delta,
        PromptForm,
        Liveness,
        Readiness,
    ),
    "openai_of_the_gateway": (
        gateway_requests.CompletionOptions,
        gateway_requests.ChatOptions,
        gateway_requests.Prompt,
        Chat,
        texts.TokenizePrompt,
        texts.TokenizeAnswer,
        texts.Detokenize,
        texts.DetokenizeAnswer,
        openai.UsageField,
        openai.ErrorBody,
    ),
    "openai_of_nodes": (node_requests.Completion, node_requests.ChatOptions),
    "kv_transfer_params": (
        kv_transfer_params.RequestParams,
        kv_transfer_params.ResponseParams,
        kv_transfer_params.RemoteDecode,
        kv_transfer_params.RemotePrefill,
        kv_transfer_params.Reference,
        kv_transfer_params.Remainder,
    ),
    "announcements": (
        readiness.KvdReady,
        readiness.NodeReady,
        readiness.GatewayReady,
        readiness.RelayReady,
        RelayStats,
    ),
}
MSGPACK: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "engine_socket": (
        engine_socket.Register,
        engine_socket.Begin,
        engine_socket.Ready,
        engine_socket.Join,
        engine_socket.Commit,
        engine_socket.Abort,
        engine_socket.Attach,
        engine_socket.Pin,
        engine_socket.Release,
        engine_socket.Publish,
        engine_socket.Flush,
        engine_socket.Registered,
        engine_socket.LeaseTicket,
        NotNow,
        engine_socket.Done,
        engine_socket.Refused,
        engine_socket.TransferEnded,
        engine_socket.NumberedCall,
        engine_socket.NumberedAnswer,
    ),
    "transport": (transport.Hello, transport.Manifest, transport.Ended, transport.Reason),
    "kv_events_of_vllm": (vllm_payloads.Stored, vllm_payloads.Removed, vllm_payloads.Cleared),
}


def goldens() -> Iterator[Golden]:
    for place, kinds in JSON.items():
        yield Golden(f"{place}.json", {**_schemas(kinds), "examples": _json_examples(kinds)})
    for place, kinds in MSGPACK.items():
        yield Golden(f"{place}.json", {**_schemas(kinds), "examples": _msgpack_examples(kinds)})
    fields = {
        "openai": {name: sorted(known) for name, known in _fields("OPENAI").items()},
        "vllm": {name: sorted(known) for name, known in _fields("VLLM").items()},
    }
    yield Golden("known_fields.json", fields)


def recorded_kinds() -> set[str]:
    """The names of all structs that are recorded."""
    kinds = [kind for table in (JSON, MSGPACK) for row in table.values() for kind in row]
    return {inner.__name__ for kind in kinds for inner in structs_in(kind)}


def _schemas(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    structs: dict[str, type[msgspec.Struct]] = {}
    for kind in kinds:
        for inner in structs_in(kind):
            known = structs.setdefault(inner.__name__, inner)
            assert known is inner, f"two structs in one place have the name {inner.__name__}"
    return {"messages": {name: described(kind) for name, kind in structs.items()}}


def _json_examples(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """The text that is sent, parsed: the order of fields means nothing."""
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, message in _examples(kind):
            data = msgspec.json.encode(message)
            assert msgspec.json.encode(msgspec.json.decode(data, type=kind)) == data, kind
            found[name] = json.loads(data)
    return found


def _msgpack_examples(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in kinds:
        for name, message in _examples(kind):
            data = msgspec.msgpack.encode(message)
            assert msgspec.msgpack.encode(msgspec.msgpack.decode(data, type=kind)) == data, kind
            found[name] = data.hex()
    return found


def _examples(kind: type[msgspec.Struct]) -> Iterator[tuple[str, msgspec.Struct]]:
    yield kind.__name__, example(kind)
    yield f"{kind.__name__}, only what is required", example(kind, only_required=True)


def _fields(name: str) -> dict[str, frozenset[str]]:
    from prfaas.contracts import openai_fields

    found: dict[str, frozenset[str]] = getattr(openai_fields, name)
    return found
