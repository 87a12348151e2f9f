from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.checkpoint.tokenizer import build_tokenizer
from prfaas.text.detokenizer import AnswerText, Detokenizer

TOKENIZER = build_tokenizer()


def decode(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=True)
    return text


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=60))
def test_pieces_make_up_the_whole_whatever_the_bytes(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    assert text == decode(ids)


def test_a_character_is_given_out_when_its_last_byte_is_there() -> None:
    detokenizer = Detokenizer(decode)
    ids = TOKENIZER.encode("né").ids
    assert [detokenizer.push(token) for token in ids] == ["n", "", "é"]


def test_a_decoder_with_leading_spaces_keeps_them_between_pieces() -> None:
    """As SentencePiece does: the first token of whatever is decoded loses its space."""
    words = ["▁a", "▁b", "▁c"]

    def stripping(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(stripping)
    assert "".join(detokenizer.push(token) for token in (0, 1, 2)) == "a b c"


def stopped(text: str, stops: list[str]) -> tuple[str, str | None]:
    answer = AnswerText(decode, stops)
    pieces = []
    for token in TOKENIZER.encode(text).ids:
        pieces.append(answer.push(token))
        if answer.stopped_by is not None:
            break
    pieces.append(answer.finish())
    return "".join(pieces), answer.stopped_by


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    given_out, by = stopped(text, stops)
    ends = {stop: text.index(stop) + len(stop) for stop in stops if stop in text}
    if not ends:
        assert (given_out, by) == (text, None)
        return
    # Token by token (here: letter by letter) the one that is complete first ends the text; of two
    # that are complete at the same letter the one that the request names first, as in vLLM.
    first = min(ends.values())
    assert by == next(stop for stop, end in ends.items() if end == first)
    assert given_out == text[: first - len(by)]


@pytest.mark.parametrize("end", ["", "x"])
def test_the_beginning_of_a_stop_string_is_held_until_it_is_known(end: str) -> None:
    answer = AnswerText(decode, ["\n\nUser:"])
    pieces = [answer.push(token) for token in TOKENIZER.encode("hi\n\nUse" + end).ids]
    assert pieces[:7] == ["h", "i", "", "", "", "", ""]
    assert "".join(pieces) + answer.finish() == "hi\n\nUse" + end


def test_without_a_decoder_there_are_tokens_only() -> None:
    answer = AnswerText(None)
    assert (answer.push(7), answer.finish(), answer.stopped_by) == ("", "", None)


def answered(text: str, *stops: str, **options: Any) -> tuple[str, str | None]:
    answer = AnswerText(lambda ids: "".join(map(chr, ids)), stops, **options)
    shown = ""
    for character in text:
        shown += answer.push(ord(character))
    return shown + answer.finish(), answer.stopped_by


def test_the_text_may_end_after_the_stop_string() -> None:
    assert answered("abcd", "bc") == ("a", "bc")
    assert answered("abcd", "bc", include_stop=True) == ("abc", "bc")
    assert answered("abcd", "bcd", "bc", include_stop=True) == ("abc", "bc")  # complete first


def test_a_stop_string_of_the_first_tokens_is_text() -> None:
    assert answered("abxab", "ab", min_tokens=2) == ("abx", "ab")
    assert answered("abxab", "ab", min_tokens=1) == ("", "ab")
    assert answered("aaa", "aa", min_tokens=2) == ("a", "aa")
    assert answered("abxab", "ab", min_tokens=9) == ("abxab", None)
