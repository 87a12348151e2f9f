"""Triton's tuner, changed: against a tuner with the same interface, since Triton needs a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.engine.hf import tuning

TOGETHER_S = 20.0


class Mode:
    """Triton's AsyncCompileMode: compilations go to the executor, and its end waits for them."""

    active: Mode | None = None

    def __init__(self, executor: Executor, *, ignore_errors: bool = False) -> None:
        self.executor, self.ignore_errors = executor, ignore_errors
        self.futures: list[Future[None]] = []

    def __enter__(self) -> Mode:
        Mode.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Mode.active = None
        for future in self.futures:
            if future.exception() is not None and not self.ignore_errors:
                future.result()


class Kernel:
    """A kernel that is compiled by its first run with a variant, and meets others doing so."""

    def __init__(self, compile_one: Callable[[int], None]) -> None:
        self.compile_one = compile_one
        self.compiled: list[int] = []
        self.ran: list[int] = []

    def run(self, *args: Any, grid: Any, warmup: bool, warps: int, **kwargs: Any) -> None:
        def work() -> None:
            self.compile_one(warps)
            self.compiled.append(warps)

        if warps not in self.compiled:
            if Mode.active is not None:
                Mode.active.futures.append(Mode.active.executor.submit(work))
            else:
                work()
        if not warmup:
            self.ran.append(warps)


class Config:
    def __init__(self, warps: int) -> None:
        self.warps = warps

    def all_kwargs(self) -> dict[str, int]:
        return {"warps": self.warps}

    def __str__(self) -> str:
        return f"warps: {self.warps}"


def make_tuner(mode: type[Mode] = Mode) -> type[Any]:
    class Tuner:
        """The parts of Triton's Autotuner that matter here, in its order of calls."""

        def __init__(self, fn: Kernel, keys: list[str], fastest: int) -> None:
            self.fn, self.keys, self.fastest = fn, keys, fastest
            self.arg_names = ["x", "h0", "D", "NB"]
            self.configs = [Config(warps) for warps in (1, 2, 4)]
            self.cache: dict[tuple[Any, ...], Config] = {}
            self.nargs: dict[str, Any] = {}
            self._do_bench: Any = None
            self.benched: list[int] = []

        def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
            return self.configs

        def _bench(self, *args: Any, config: Config, **meta: Any) -> float:
            self.benched.append(config.warps)
            self.fn.run(*args, **meta, **config.all_kwargs())
            return 0.0 if config.warps == self.fastest else 1.0

        def run(self, *args: Any, **kwargs: Any) -> None:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            every = {**self.nargs, **kwargs}
            tensors = (value for value in every.values() if hasattr(value, "dtype"))
            key = (*(every[name] for name in self.keys), *(str(one.dtype) for one in tensors))
            if key not in self.cache:
                timings = {
                    config: self._bench(*args, config=config, **kwargs)
                    for config in self.prune_configs(kwargs)
                }
                self.cache[key] = min(timings, key=lambda config: timings[config])
            self.fn.run(*args, **kwargs, **self.cache[key].all_kwargs())

    tuning.change_tuner(Tuner, mode, "quick")
    return Tuner


def call(tuner: Any, blocks: int, width: int = 64, state: str | None = None) -> None:
    x = SimpleNamespace(dtype="bfloat16")
    h0 = None if state is None else SimpleNamespace(dtype=state)
    tuner.run(x, h0, grid=(1,), warmup=False, D=width, NB=blocks)


def nothing(_: int) -> None: ...


def test_variants_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.os, "cpu_count", lambda: 8)
    together = threading.Barrier(3)
    kernel = Kernel(lambda _: together.wait(TOGETHER_S) and None)
    tuner = make_tuner()(kernel, ["D"], fastest=2)
    call(tuner, 1)
    assert sorted(kernel.compiled) == [1, 2, 4]  # each once
    assert tuner.benched == [1, 2, 4] and kernel.ran == [1, 2, 4, 2]


def test_a_kernel_is_not_tuned_again_at_another_length() -> None:
    tuner = make_tuner()(Kernel(nothing), ["D", "NB"], fastest=4)
    for blocks in (1, 2, 3):
        call(tuner, blocks)
    assert tuner.benched == [1, 2, 4, 4, 4]
    call(tuner, 3, width=128)  # another size of heads is another kernel
    assert tuner.benched[5:] == [1, 2, 4]


def test_a_kernel_is_not_tuned_again_with_a_tensor_that_it_can_do_without() -> None:
    tuner = make_tuner()(Kernel(nothing), ["D"], fastest=4)
    call(tuner, 1)
    call(tuner, 1, state="bfloat16")
    assert tuner.benched == [1, 2, 4, 4]
    call(tuner, 1, state="float32")  # its arithmetic may differ
    assert tuner.benched[4:] == [1, 2, 4]


def test_many_variants_are_not_all_tried() -> None:
    tuner = make_tuner()(Kernel(nothing), ["D"], fastest=35)
    tuner.configs = [Config(warps) for warps in range(36)]
    call(tuner, 1)
    assert tuner.benched == [0, 8, 17, 26, 35]


def test_a_variant_that_does_not_compile_is_left_to_the_tuner() -> None:
    class Unfit(Exception):
        pass

    def compile_one(warps: int) -> None:
        if warps == 4:
            raise Unfit

    tuner = make_tuner()(Kernel(compile_one), ["D"], fastest=1)
    with pytest.raises(Unfit):  # by the tuner's own run of that variant
        call(tuner, 1)
    assert tuner.benched == [1, 2, 4] and Mode.active is None


def test_an_unknown_interface_is_tuned_as_before(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Mode):
        def __init__(self, executor: Executor) -> None:
            super().__init__(executor)

    tuner = make_tuner(Odd)(Kernel(nothing), ["D", "NB"], fastest=2)
    tuner.cache = _Unreadable()
    with caplog.at_level("INFO"):
        call(tuner, 1)
        call(tuner, 2)
    assert tuner.benched == [1, 2, 4, 1, 2, 4]
    assert "compiled one after the other: TypeError" in caplog.text
    assert "tuned at every length: TypeError" in caplog.text


class _Unreadable(dict[Any, Any]):
    def items(self) -> Any:
        raise TypeError("of another version")


def test_the_timer_is_short_unless_the_kernel_has_its_own() -> None:
    made = make_tuner()
    tuner, other = (made(Kernel(nothing), ["D"], fastest=1) for _ in range(2))
    other._do_bench = "its own"
    call(tuner, 1)
    call(other, 1)
    assert tuner.__dict__["do_bench"] == "quick" and "do_bench" not in other.__dict__


def test_without_triton_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    assert not tuning.speed_up()
