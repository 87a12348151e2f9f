"""The hf engine of a node: its warm-up, and what is read ahead of its load."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.clock import MonotonicClock
from prfaas.engine.checkpoint import read_ahead as reading
from prfaas.engine.warm_up import warm_up
from prfaas.errors import InputError
from prfaas.launch.engine_choice import EngineChoice, hf_engine
from tests.engine.hf.models import checkpoint
from tests.waiting import wait_until


def test_no_warm_up_on_a_cpu_unless_it_is_named() -> None:
    choice = EngineChoice(str(checkpoint("qwen3")), 64, 16)
    chosen = hf_engine(choice, "cpu", None)
    chosen.engine.close()
    assert chosen.default_warm_up == ()
    with pytest.raises(InputError, match=r"node\.warm_up: a prompt of 10000000 tokens"):
        hf_engine(choice, "cpu", None, [10_000_000])


def test_a_tiny_model_is_warmed_up() -> None:
    chosen = hf_engine(EngineChoice(str(checkpoint("kimi-linear")), 64, 16, 3, 32), "cpu", None)
    try:
        report = warm_up(chosen.engine, [70, 5], MonotonicClock())
        assert (report.lengths, report.together) == ((70, 5), 3)
        stats = chosen.engine.stats()
        assert (stats.waiting, stats.prefilling, stats.running) == (0, 0, 0)
    finally:
        chosen.engine.close()


def test_weights_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of every file, once; files that vanish are left to the loader."""
    monkeypatch.setattr(reading, "LEAST_BYTES", 1)
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)
    read: list[int] = []
    plain = reading.os.preadv

    def preadv(descriptor: int, buffers: list[bytearray], start: int) -> int:
        read.append(plain(descriptor, buffers, start))
        return read[-1]

    monkeypatch.setattr(reading.os, "preadv", preadv)
    for name, size in (("a", 250), ("b", 30)):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * size)
    (tmp_path / "other.bin").write_bytes(b"x" * 500)
    with reading.read_ahead(tmp_path):
        wait_until(lambda: len(read) == 4)
    assert sorted(read) == [30, 50, 100, 100]
    with reading.read_ahead(tmp_path / "nowhere"):
        pass


def test_a_small_checkpoint_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 250)
    monkeypatch.setattr(reading.threading, "Thread", None)
    with reading.read_ahead(tmp_path):
        pass
    monkeypatch.setattr(reading, "LEAST_BYTES", 1)
    monkeypatch.setattr(reading, "_available_bytes", lambda: 400)  # it would displace others
    with reading.read_ahead(tmp_path):
        pass
