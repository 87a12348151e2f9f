import msgspec

from prfaas.types import BlockHash, Compat, Grant, HashEvent, NodeId, NotNow, TransferId

COMPAT = Compat("m", "r1", "bfloat16", "float32", 64, "canonical")


def test_compat_names_what_differs() -> None:
    other = msgspec.structs.replace(COMPAT, kv_dtype="float16", tensor_parallel=2)
    assert COMPAT.differences(other) == (
        "kv_dtype: bfloat16 here, float16 there",
        "tensor_parallel: 1 here, 2 there",
    )
    assert COMPAT.differences(COMPAT) == ()


def test_an_answer_to_open_is_a_grant_or_not_now() -> None:
    grant = Grant(TransferId("t"), "secret", "h:1", {"full0": 64}, 10, 30.0)
    not_now = NotNow("arena full", 0.5)
    decoder = msgspec.msgpack.Decoder(Grant | NotNow)
    for answer in (grant, not_now):
        assert decoder.decode(msgspec.msgpack.encode(answer)) == answer


def test_a_hash_event_survives_the_wire_and_passes_no_token_ids_on() -> None:
    event = HashEvent(1, NodeId("n"), "full0", 64, (BlockHash(b"\0" * 32),), "stored")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=HashEvent) == event
    raw = msgspec.to_builtins(event) | {"token_ids": [1, 2]}
    assert msgspec.to_builtins(msgspec.convert(raw, HashEvent)) == msgspec.to_builtins(event)
