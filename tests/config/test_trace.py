from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from prfaas.config.trace import TraceRow, known_blocks, parse_rows, read_trace
from prfaas.errors import InputError


def row(length: int, blocks: list[int], output: int = 10, answer: list[int] | None = None) -> str:
    fields = {"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": blocks}
    return json.dumps(fields if answer is None else {**fields, "answer_hash_ids": answer})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: .*give timestamp"),
        ('{"timestamp": 0}', "line 2: .*input_length.*give timestamp"),
        (row(0, []), "line 2: input_length is 0"),
        (row(-5, []), "line 2: input_length is -5"),
        (row(10, [1], output=0), "line 2: output_length is 0"),
        (row(512, [1, 2]), "line 2: 2 hash_ids for 512 tokens; .*block_tokens = 512"),
        (row(513, [1]), "line 2: 1 hash_ids for 513 tokens"),
        (row(10, [-1]), "line 2: hash id -1"),
        (row(10, [1], output=600, answer=[-7]), "line 2: hash id -7"),
        (row(10, [1], output=600, answer=[5, 6]), "2: 2 answer_hash_ids .* completes 1 blocks"),
        (row(10, [1], answer=[5]), "2: 1 answer_hash_ids for an answer that completes 0"),
        ('{"timestamp":0,"input_length":"9","output_length":1,"hash_ids":[1]}', "2: .*`int`"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(parse_rows([row(10, [1]), line], 512))


def test_plain_and_packed_files(tmp_path: Path) -> None:
    text = row(600, [1, 2]) + "\n\n" + row(5, [3]) + "\n"
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.xz"
    plain.write_text(text)
    packed.write_bytes(lzma.compress(text.encode()))
    rows = [TraceRow(0, 600, 10, [1, 2]), TraceRow(0, 5, 10, [3])]
    assert list(read_trace(plain)) == list(read_trace(packed)) == rows


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "b.jsonl.xz"
    broken.write_bytes(b"not xz")
    for path, message in (
        (tmp_path / "none.jsonl", "no such file"),
        (tmp_path / "none.jsonl.xz", "no such file"),
        (broken, "not an intact .xz"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            list(read_trace(path))
        assert str(caught.value).startswith(str(path))


def test_known_blocks_are_a_run_from_the_start() -> None:
    seen: set[int] = set()
    runs = [known_blocks(TraceRow(0, 1500, 1, ids), seen) for ids in ([1, 2], [1, 2, 3], [9, 2])]
    assert runs == [0, 2, 0]
