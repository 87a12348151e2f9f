"""What `bench/quick.py` concludes from its samples, and the ratios that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.benches import bench

quick = bench("quick")
from _quick_judge import Figure, Judged, Measured, Sample, best, fails, judge  # noqa: E402
from _quick_parts import FIGURES, PARTS, Turns, undisturbed_s  # noqa: E402

RATE = Figure("requests", "requests/s", "an echo")
TIME = Figure("start", "ms", "an empty process")


def measured(ratio: float) -> Measured:
    return Measured(10 * ratio, 10.0, ratio)


def test_a_ratio_is_that_of_the_best_samples() -> None:
    samples = [Sample("rate", 40.0, 100.0), Sample("rate", 50.0, 80.0), Sample("rate", 5.0, 10.0)]
    assert best({"rate": RATE}, samples) == {"rate": Measured(50.0, 100.0, 0.5)}


def test_a_ratio_of_times_falls_when_the_figure_takes_longer() -> None:
    samples = [Sample("start", 60.0, 20.0), Sample("start", 50.0, 30.0)]
    assert best({"start": TIME}, samples) == {"start": Measured(50.0, 20.0, 0.4)}


def test_two_thirds_of_the_committed_ratio_are_enough() -> None:
    held = judge({"a": measured(0.61), "b": measured(0.59)}, {"a": 0.9, "b": 0.9})
    assert [one.verdict for one in held] == ["held", "slower"]
    assert fails(held) == ["b"]


def test_a_figure_without_a_committed_ratio_passes() -> None:
    found = judge({"a": measured(0.001)}, {})
    assert found == [Judged("a", "not committed", None, measured(0.001))]
    assert fails(found) == []


def test_a_committed_figure_that_was_not_measured_fails() -> None:
    assert fails(judge({}, {"a": 0.5})) == ["a"]


def test_time_without_a_core_does_not_count() -> None:
    assert undisturbed_s(2.0, [Turns(0.3, 0.5), Turns(0.1, 0.25)]) == 1.25


def test_delays_that_overlap_leave_the_time_of_the_longest_process() -> None:
    assert undisturbed_s(2.0, [Turns(0.3, 1.6), Turns(0.5, 1.4)]) == 0.5


def test_time_in_which_processes_wait_for_each_other_counts() -> None:
    assert undisturbed_s(5.0, [Turns(0.1, 0.25), Turns(0.2, 0.25)]) == 4.5


# The command --------------------------------------------------------------------------------------


class Runs:
    """Parts whose measurements are given in advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path, committed: object) -> None:
        self.made: list[str] = []
        file.write_text(json.dumps(committed))
        monkeypatch.setattr(quick, "COMMITTED", file)
        monkeypatch.setattr(quick.platform, "machine", lambda: "x1")
        # A limit on the time of the run would outlive it, because the test's process goes on.
        monkeypatch.setattr(quick.faulthandler, "dump_traceback_later", lambda *_, **__: None)
        monkeypatch.setattr(quick, "FIGURES", {"a.rate": RATE, "b.start": TIME})
        self._monkeypatch = monkeypatch

    def give(self, rates: list[float], times: list[float]) -> None:
        def part(name: str, figure: str, values: list[float]) -> object:
            def measure() -> list[Sample]:
                self.made.append(name)
                return [Sample(figure, values.pop(0), 10.0)]

            return measure

        parts = {"a": part("a", "a.rate", rates), "b": part("b", "b.start", times)}
        self._monkeypatch.setattr(quick, "PARTS", parts)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(monkeypatch, tmp_path / "quick.json", {"x1": {"a.rate": 0.9, "b.start": 0.5}})


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(quick.main, arguments)
    return done.exit_code, done.output


def test_only_a_low_figure_is_measured_again(runs: Runs) -> None:
    runs.give(rates=[3.0, 8.0], times=[20.0])
    code, output = run()
    assert (code, runs.made) == (0, ["a", "b", "a"])
    assert "measured again: a.rate" in output


def test_a_figure_that_is_low_twice_fails(runs: Runs) -> None:
    runs.give(rates=[3.0, 4.0], times=[20.0])
    code, output = run()
    assert code == 1
    assert "a.rate is below 0.67 of its committed ratio, twice" in output


def test_another_architecture_passes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick.platform, "machine", lambda: "y2")
    runs.give(rates=[0.1], times=[9999.0])
    assert run()[0] == 0


def test_an_update_replaces_what_was_measured_on_this_architecture(runs: Runs) -> None:
    ratios = {"x1": {"a.rate": 0.9, "b.start": 0.5}, "y2": {"a.rate": 0.7}}
    quick.COMMITTED.write_text(json.dumps(ratios))
    runs.give(rates=[3.0], times=[20.0])
    assert run("--update", "--only", "a")[0] == 0
    assert runs.made == ["a"]
    assert json.loads(quick.COMMITTED.read_text()) == {
        "x1": {"a.rate": 0.3, "b.start": 0.5},
        "y2": {"a.rate": 0.7},
    }


def test_only_names_parts() -> None:
    with pytest.raises(quick.InputError, match="there is no part 'gatway'"):
        quick._chosen("gatway")


# The committed ratios -----------------------------------------------------------------------------


def test_every_figure_belongs_to_a_part() -> None:
    assert {quick.part_of(name) for name in FIGURES} == set(PARTS)


def test_committed_ratios_are_of_figures_that_are_measured() -> None:
    for machine, ratios in quick.read_committed(quick.COMMITTED).items():
        assert ratios.keys() == FIGURES.keys(), (
            f"python -m prfaas_lab bench quick --update on {machine}"
        )
