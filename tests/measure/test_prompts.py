from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from prfaas.measure.prompts import TEXT_IDS, PromptGenerator, PromptPart

PROMPTS = PromptGenerator()


def ids(*runs: PromptPart, prompts: PromptGenerator = PROMPTS) -> list[int]:
    found: list[int] = json.loads(b"[" + prompts.text(runs) + b"]")
    return found


@given(
    st.lists(
        st.builds(PromptPart, st.binary(max_size=4), st.integers(1, 300)), min_size=1, max_size=5
    )
)
def test_length_and_vocabulary(runs: list[PromptPart]) -> None:
    found = ids(*runs)
    assert len(found) == sum(run.tokens for run in runs)
    assert set(found) <= set(TEXT_IDS)


@given(st.binary(max_size=8), st.integers(1, 400), st.integers(1, 400))
def test_a_key_is_a_prefix_of_itself(key: bytes, one: int, other: int) -> None:
    short, long = sorted((one, other))
    assert ids(PromptPart(key, long))[:short] == ids(PromptPart(key, short))


def test_keys_differ_within_their_first_tokens() -> None:
    heads = {tuple(ids(PromptPart(b"%d" % number, 40))[:32]) for number in range(2000)}
    assert len(heads) == 2000


def test_another_vocabulary() -> None:
    prompts = PromptGenerator(range(5000, 5002))
    assert set(ids(PromptPart(b"x", 1000), prompts=prompts)) == {5000, 5001}
