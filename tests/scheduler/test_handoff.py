from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.handoff import MAX_TAIL_TOKENS, choose_handoff


@given(st.integers(1, 5000), st.sampled_from([16, 64, 512]), st.booleans())
def test_rules(prompt: int, block: int, resumable: bool) -> None:
    tokens, checkpoint = choose_handoff(prompt, block, resumable=resumable)
    assert 0 <= tokens < prompt, "the decode node computes at least the last token"
    if tokens % block == 0 and tokens:
        assert prompt - tokens <= MAX_TAIL_TOKENS or tokens == prompt - 1
    else:
        assert tokens == prompt - 1
    if checkpoint is not None:
        assert resumable and checkpoint % block == 0 and 0 < checkpoint <= tokens
        assert tokens - checkpoint < block


def test_cases() -> None:
    assert choose_handoff(1000, 64, resumable=True) == (960, None)
    assert choose_handoff(1024, 64, resumable=True) == (960, None), "64 tokens after the boundary"
    assert choose_handoff(1300, 512, resumable=True) == (1299, 1024)
    assert choose_handoff(1300, 512, resumable=False) == (1299, None)
    assert choose_handoff(300, 512, resumable=True) == (299, None), "no boundary to save at"
    assert choose_handoff(1, 64, resumable=True) == (0, None), "straight to the decode node"
