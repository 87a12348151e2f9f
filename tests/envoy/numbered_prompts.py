"""Prompts that begin with the number of their request. They share no block with each other."""

from __future__ import annotations

from collections.abc import Sequence

DIGITS, BASE, FIRST = 4, 64, 32


def numbered_prompt(number: int, tokens: int) -> list[int]:
    digits = [FIRST + number // BASE**place % BASE for place in range(DIGITS)]
    return digits + [FIRST + place % BASE for place in range(tokens - DIGITS)]


def number_of(prompt: Sequence[int]) -> int:
    return sum((int(prompt[place]) - FIRST) * BASE**place for place in range(DIGITS))
