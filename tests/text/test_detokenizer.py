from __future__ import annotations

from collections.abc import Sequence
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


HALVES = st.sampled_from(["80", "c3", "a9", "e2", "82", "ac", "f0", "9f", "98", "2e"])


@given(st.lists(HALVES, max_size=60))
def test_halves_of_characters_are_what_they_are_in_the_whole(given: list[str]) -> None:
    raw = bytes.fromhex("".join(given))
    detokenizer = Detokenizer(lambda ids: bytes(ids).decode(errors="replace"))
    text = "".join(detokenizer.push(byte) for byte in raw) + detokenizer.finish()
    assert text == raw.decode(errors="replace")


@pytest.mark.parametrize(
    ("half", "shown"),
    [(b"\x80", "\ufffd"), (b"\xf0", "\ufffd"), (b"\xf0\x90\x80", "\ufffd"), (b"", "")],
)
def test_endless_halves_of_characters_are_given_out_at_a_constant_cost(
    half: bytes, shown: str
) -> None:
    """So are endless tokens without a text, such as special ones."""
    longest = decodings = 0
    tokens = {0: b"a", 1: half, 2: "\N{SLICE OF PIZZA}".encode()}

    def decode_bytes(ids: Sequence[int]) -> str:
        nonlocal longest, decodings
        longest, decodings = max(longest, len(ids)), decodings + 1
        return b"".join(tokens[token] for token in ids).decode(errors="replace")

    detokenizer = Detokenizer(decode_bytes)
    text = detokenizer.push(0)
    for count in range(1, 5001):
        text += detokenizer.push(1)
        assert len(text) >= 1 + len(shown) * (count - 5)
    text += detokenizer.push(2) + detokenizer.finish()
    assert text == "a" + 5000 * shown + "\N{SLICE OF PIZZA}"
    assert longest <= 10 and decodings <= 3 * 5002


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


def stopped_naively(
    pieces: list[str], stops: list[str], min_tokens: int
) -> tuple[list[str], str | None]:
    """What clients get after each piece, and after the last one: by definition, from the whole
    text."""
    free, text, given_out, sent = len("".join(pieces[:min_tokens])), "", 0, []
    for piece in pieces:
        before, text = len(text), text + piece
        ends = [
            (end, stop)
            for stop in stops
            for end in range(max(before, free) + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, by = min(ends, key=lambda found: found[0])
            return [*sent, text[given_out : end - len(by)]], by
        held = max(
            (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
        )
        sent.append(text[given_out : len(text) - held])
        given_out = len(text) - held
    return [*sent, text[given_out:]], None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.integers(0, 3),
)
def test_stop_strings_agree_with_their_definition(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    answer = AnswerText(
        lambda ids: "".join(pieces[token] for token in ids), stops, min_tokens=min_tokens
    )
    sent = []
    for token in range(len(pieces)):
        sent.append(answer.push(token))
        if answer.stopped_by is not None:
            break
    else:
        sent.append(answer.finish())
    assert (sent, answer.stopped_by) == stopped_naively(pieces, stops, min_tokens)


class CountedText(str):
    """Counts the characters of it that are looked at, one by one or copied."""

    looked_at = 0

    def __getitem__(self, at: Any) -> str:
        found = super().__getitem__(at)
        CountedText.looked_at += len(found)
        return found


@pytest.mark.parametrize("characters_per_token", [1, 128])
def test_the_work_of_stop_strings_is_linear_in_the_text(characters_per_token: int) -> None:
    """Stop strings that nearly match everywhere."""
    CountedText.looked_at = 0
    stops = [CountedText("a" * n + "b") for n in range(1000, 1016)]
    piece = "a" * characters_per_token
    answer = AnswerText(lambda ids: piece * len(ids), stops)
    tokens = 4096 // characters_per_token
    text = "".join(answer.push(0) for _ in range(tokens))
    # The last characters may be the beginning of the longest stop string.
    assert len(text) == tokens * characters_per_token - 1015 and not answer.stopped_by
    assert CountedText.looked_at <= 6 * len(stops) * 4096


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
