from __future__ import annotations

from pathlib import Path

from prfaas_lab.documents.api import at_node, at_vllm, reference

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_page_is_that_of_the_schema() -> None:
    assert PAGE.read_text() == reference(), "docs/api.md is stale; run `make docs`"


def test_what_becomes_of_a_field() -> None:
    assert at_node("completions", "temperature") == "served"
    assert at_node("completions", "use_beam_search") == "only `false`"
    assert at_node("chat", "metadata") == "no effect"
    assert at_node("completions", "moderation") == "refused"
    assert at_vllm("chat", "structured_outputs") == "passed on"
    assert at_vllm("chat", "guided_json") == at_vllm("chat", "chat_template") == "refused"
    assert at_vllm("completions", "best_of") == "only `1`"
