"""Mooncake-format traces: one JSON object per line, a block id per `block_tokens` tokens.

Equal ids at equal positions mean the same prefix. Planner and cache read the same rows. A row may
also have the ids of the blocks that its answer completes: the next turn's prompt begins with them.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from prfaas.config.strict import read_text
from prfaas.errors import InputError

TRACE_BLOCK_TOKENS = 512  # in the public traces


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]
    # Of the whole blocks of prompt and answer, behind the whole blocks of the prompt. The public
    # traces do not have them.
    answer_hash_ids: list[int] = []


def read_trace(path: Path, block_tokens: int = TRACE_BLOCK_TOKENS) -> Iterator[TraceRow]:
    """Rows of a `.jsonl` or `.jsonl.xz` file, in its order."""
    try:
        yield from parse_rows(_lines(path), block_tokens)
    except InputError as error:
        raise error.in_file(path) from None


def parse_rows(lines: Iterable[str], block_tokens: int) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(TraceRow)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _checked(decoder, line, f"line {number}", block_tokens)


def known_blocks(row: TraceRow, seen: set[int]) -> int:
    """Number of blocks at the start of the row that earlier rows had. Adds this row's to `seen`."""
    run = 0
    for block in row.hash_ids:
        if block not in seen:
            break
        run += 1
    seen.update(row.hash_ids)
    return run


def _checked(
    decoder: msgspec.json.Decoder[TraceRow], line: str, where: str, block_tokens: int
) -> TraceRow:
    try:
        row = decoder.decode(line)
    except msgspec.ValidationError as error:
        fix = "give timestamp, input_length, output_length and hash_ids in each line"
        raise InputError(str(error).replace("$.", ""), where=where, fix=fix) from None
    except msgspec.DecodeError as error:
        raise InputError(
            f"not JSON: {error}", where=where, fix="correct or remove the line"
        ) from None
    for name, length in (("input", row.input_length), ("output", row.output_length)):
        if length < 1:
            raise InputError(f"{name}_length is {length}", where=where, fix="give 1 or more")
    if len(row.hash_ids) != -(-row.input_length // block_tokens):
        raise InputError(
            f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens",
            where=where,
            fix=f"one id covers block_tokens = {block_tokens} tokens; set it to the trace's value",
        )
    completed = (row.input_length + row.output_length) // block_tokens
    completed -= row.input_length // block_tokens
    if len(row.answer_hash_ids) not in (0, completed):
        raise InputError(
            f"{len(row.answer_hash_ids)} answer_hash_ids for an answer that completes {completed} "
            "blocks",
            where=where,
            fix="give one id for each of them, or none",
        )
    lowest = min([*row.hash_ids, *row.answer_hash_ids])
    if lowest < 0:
        raise InputError(f"hash id {lowest}", where=where, fix="give 0 or more")
    return row


def _lines(path: Path) -> list[str]:
    if path.suffix != ".xz":
        return read_text(path).splitlines()
    try:
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            return stream.read().splitlines()
    except FileNotFoundError:
        raise InputError("no such file", file=path, fix="check the path") from None
    except (lzma.LZMAError, EOFError, UnicodeDecodeError):
        raise InputError("is not an intact .xz text file", file=path) from None
