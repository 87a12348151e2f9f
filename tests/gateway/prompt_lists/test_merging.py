from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway.prompt_lists import merging
from prfaas.gateway.prompt_lists.merging import AnswerMerger


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def piece(answer_id: str, index: int, text: str) -> bytes:
    return event(id=answer_id, created=1, model="m", choices=[{"index": index, "text": text}])


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, **details}


def read(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))


def test_a_merged_stream_has_one_id_one_usage_and_one_end() -> None:
    merger = AnswerMerger(prompts=3, n=2)
    second = merger.events(1, [piece("b", 0, "x"), piece("b", 1, "y")], None)
    first = merger.events(0, [piece("a", 1, "z"), b"data: [DONE]\n\n"], None)
    last = merger.events(
        2, [piece("c", 0, "w"), event(id="c", choices=[], usage=usage(5, 2, 1))], None
    )
    seen = [read(one) for one in [*second, *first, *last]]
    assert [(one["id"], one["choices"][0]["index"]) for one in seen] == [
        *(("b", 2), ("b", 3)),
        ("b", 1),
        ("b", 4),
    ]
    # A hand-off of the second prompt: its engine counts all tokens as cached, and 3 of them were.
    assert merger.events(1, [event(id="b", choices=[], usage=usage(7, 4, 6))], 3) == []
    total, done = merger.closing()
    assert read(total)["usage"] == {
        **{"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18},
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert read(total)["choices"] == [] and read(total)["id"] == "b" and done == merging.DONE
    reported = merger.usage_of(2)
    assert reported is not None and reported.completion_tokens == 2 and not merger.usage_of(0)


def test_a_piece_keeps_its_other_fields_and_its_own_usage() -> None:
    """As with continuous_usage_stats, and as in a first piece with the prompt's ids."""
    fields = {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "é", "logprobs": {"tokens": ["é"]}}],
        "usage": usage(1, 1),
    }
    (shown,) = AnswerMerger(prompts=2, n=1).events(1, [event(**fields)], None)
    moved = {**fields, "choices": [{**fields["choices"][0], "index": 1}]}  # type: ignore[index]
    assert read(shown) == moved


def test_a_stream_without_usage_ends_without_usage() -> None:
    merger = AnswerMerger(prompts=2, n=1)
    merger.events(0, [piece("a", 0, "x")], None)
    assert merger.closing() == [merging.DONE]


def test_merged_bodies_are_in_the_order_of_the_prompts() -> None:
    merger = AnswerMerger(prompts=2, n=2)
    for number, name in ((1, "b"), (0, "a")):
        choices = [{"index": j, "text": f"{name}{j}"} for j in range(2)]
        body = {"id": name, "model": "m", "choices": choices, "usage": usage(3, 4)}
        body["kv_transfer_params"] = {"transfer_id": name}
        merger.add_body(number, json.dumps(body).encode(), None)
    merged = json.loads(merger.body())
    assert [choice["text"] for choice in merged["choices"]] == ["a0", "a1", "b0", "b1"]
    assert [choice["index"] for choice in merged["choices"]] == [0, 1, 2, 3]
    assert merged["id"] == "b" and "kv_transfer_params" not in merged
    assert merged["usage"] == {**usage(6, 8), "total_tokens": 14}


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{"index": 2}]}',
        b'{"usage": {}, "choices": 1}',
    ],
)
def test_what_is_not_an_answer_breaks_the_stream(data: bytes) -> None:
    with pytest.raises(StreamBroken):
        AnswerMerger(prompts=2, n=2).add_body(0, data, None)
    with pytest.raises(StreamBroken):
        AnswerMerger(prompts=2, n=2).events(0, [b"data: " + data + b"\n\n"], None)


def test_the_bodies_of_one_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGED_BYTES", 30)
    merger = AnswerMerger(prompts=2, n=1)
    merger.add_body(0, b'{"id": "a", "choices": []}', None)
    with pytest.raises(RequestError, match="more than 30 bytes"):
        merger.add_body(1, b'{"id": "a", "choices": []}', None)
