"""The fluid link against answers by hand and against a simulation in tiny time steps."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.events import Events
from prfaas.sim.network.links import FluidLink, LinkTransfer


class Bench:
    """A link of 100 bit/s whose transfers note when they are done."""

    def __init__(self, bps: float = 100.0) -> None:
        self.events = Events()
        self.link = FluidLink(self.events, bps, bin_s=1.0)
        self.done: dict[str, float] = {}
        self.flows: dict[str, LinkTransfer] = {}

    def prefill(self, name: str, at_s: float, seconds: float, bits: float, closing: float) -> None:
        def start(_: object) -> None:
            flow = self.link.produce(bits, seconds, lambda: self._finish(name))
            self.flows[name] = flow
            self.events.at(at_s + seconds, lambda _: self._close(flow, closing))

        self.events.at(at_s, start)

    def copy(self, name: str, at_s: float, bits: float) -> None:
        def start(_: object) -> None:
            self.flows[name] = self.link.send(bits, lambda: self._finish(name))

        self.events.at(at_s, start)

    def rate(self, at_s: float, bps: float) -> None:
        self.events.at(at_s, self.link.set_bps, bps)

    def run(self) -> dict[str, float]:
        self.events.run_before(inf)
        return self.done

    def _close(self, flow: LinkTransfer, closing: float) -> None:
        if not flow.ended:
            self.link.drain(flow, closing)

    def _finish(self, name: str) -> None:
        self.done[name] = self.events.now_s


# Bits are counted in millions, so that the link's rounding of a hundred is nothing.
M = 1e6


def test_a_slow_prefill_hides_its_transfer() -> None:
    bench = Bench(100 * M)
    bench.prefill("a", 1.0, 10.0, 500 * M, 50 * M)
    assert bench.run()["a"] == pytest.approx(11.5), "only the closing part is exposed"


def test_a_fast_prefill_waits_for_the_link() -> None:
    bench = Bench(100 * M)
    bench.prefill("a", 0.0, 2.0, 500 * M, 50 * M)
    assert bench.run()["a"] == pytest.approx(5.5)


def test_copies_share_fairly() -> None:
    bench = Bench(100 * M)
    bench.copy("short", 0.0, 100 * M)
    bench.copy("long", 0.0, 300 * M)
    assert bench.run() == pytest.approx({"short": 2.0, "long": 4.0})


def test_bandwidth_that_a_slow_producer_does_not_use_goes_to_others() -> None:
    bench = Bench(100 * M)
    bench.prefill("slow", 0.0, 10.0, 100 * M, 0.0)  # 10 per second
    bench.copy("greedy", 0.0, 180 * M)
    done = bench.run()
    assert done["greedy"] == pytest.approx(2.0) and done["slow"] == pytest.approx(10.0)


def test_a_backlog_is_caught_up_when_there_is_room() -> None:
    bench = Bench(100 * M)
    bench.prefill("a", 0.0, 10.0, 600 * M, 0.0)  # 60 per second against a share of 50 at first
    bench.copy("b", 0.0, 100 * M)
    done = bench.run()
    assert done["b"] == pytest.approx(2.0)
    assert done["a"] == pytest.approx(10.0), "a backlog of 20 at 2 s, none at 2.5 s"


def test_an_outage_stops_everything_and_nothing_is_lost() -> None:
    bench = Bench(100 * M)
    bench.copy("a", 0.0, 300 * M)
    bench.rate(1.0, 0.0)
    bench.rate(61.0, 50 * M)
    assert bench.run()["a"] == pytest.approx(65.0)


def test_cancelling_leaves_the_rest_to_others() -> None:
    bench = Bench(100 * M)
    bench.copy("a", 0.0, 200 * M)
    bench.copy("b", 0.0, 200 * M)
    bench.prefill("c", 0.0, 9.0, 1.0, 1.0)
    bench.events.at(1.0, lambda _: bench.link.cancel(bench.flows["a"]))
    bench.events.at(1.5, lambda _: bench.link.cancel(bench.flows["c"]))
    bench.events.at(1.5, lambda _: bench.link.cancel(bench.flows["c"]))
    assert bench.run() == pytest.approx({"b": 2.5})
    assert bench.link.idle


def test_carried_bits_are_counted_in_bins() -> None:
    bench = Bench(100 * M)
    bench.copy("a", 0.5, 230 * M)
    bench.run()
    assert bench.link.carried_bits == pytest.approx([50 * M, 100 * M, 80 * M])


def test_reports() -> None:
    bench = Bench(100 * M)
    bench.copy("a", 0.0, 300 * M)
    said = []
    for now in (1.0, 2.0, 10.0):
        bench.events.at(now, lambda _: said.append(bench.link.report("pd", 0.02)))
    bench.run()
    busy, half, idle = said
    assert busy.goodput_bps == half.goodput_bps == pytest.approx(100 * M)
    assert busy.backlog_bytes == pytest.approx(25 * M) and busy.waited_s == pytest.approx(1.0)
    assert busy.delivery_bps == 100 * M
    assert idle.backlog_bytes == 0 and idle.waited_s == 0 and idle.delivery_bps is None
    bench.link.set_bps(0.0)
    bench.copy("b", 11.0, 300 * M)
    bench.events.run_before(20.0)
    cut = bench.link.report("pd", 0.02)
    assert cut.connections == 0 and cut.waited_s == pytest.approx(10.0) and cut.goodput_bps == 0


prefills = st.tuples(
    st.floats(0, 5), st.floats(0.1, 5), st.floats(0, 300), st.floats(0, 50)
)  # start, seconds, bits, closing bits


@given(
    st.lists(prefills, min_size=1, max_size=5),
    st.lists(st.tuples(st.floats(0, 5), st.floats(10, 300)), max_size=3),
    st.one_of(st.none(), st.tuples(st.floats(0, 5), st.sampled_from([20.0, 300.0]))),
)
def test_against_small_steps(
    flows: list[tuple[float, float, float, float]],
    copies: list[tuple[float, float]],
    change: tuple[float, float] | None,
) -> None:
    bench = Bench(100 * M)
    for place, (start, seconds, bits, closing) in enumerate(flows):
        bench.prefill(f"p{place}", start, seconds, bits * M, closing * M + 1e3)
    for place, (start, bits) in enumerate(copies):
        bench.copy(f"c{place}", start, bits * M)
    if change is not None:
        bench.rate(change[0], change[1] * M)
    done = bench.run()
    expected = small_steps(flows, copies, change)
    assert done.keys() == expected.keys()
    for name, when in expected.items():
        assert done[name] == pytest.approx(when, abs=0.03, rel=0.01), name
    total = sum(b + c for _, _, b, c in flows) + sum(b for _, b in copies)
    assert sum(bench.link.carried_bits) == pytest.approx(total * M, rel=1e-3, abs=1e4)


def small_steps(
    flows: list[tuple[float, float, float, float]],
    copies: list[tuple[float, float]],
    change: tuple[float, float] | None,
    longest_step: float = 0.005,
) -> dict[str, float]:
    """Fair shares by small steps: each step divides its bits evenly over the active transfers.

    Steps end where a transfer begins, ends or changes. Otherwise, on a slow link with many
    transfers, a few bits counted at another rate would make a difference of seconds.
    """
    due: dict[str, float] = {f"p{i}": b + c for i, (_, _, b, c) in enumerate(flows)}
    due |= {f"c{i}": b for i, (_, b) in enumerate(copies)}
    ends = {f"p{i}": f[0] + f[1] for i, f in enumerate(flows)}
    ends |= {f"c{i}": c[0] for i, c in enumerate(copies)}
    edges = sorted({f[0] for f in flows} | set(ends.values()) | ({change[0]} if change else set()))
    done: dict[str, float] = {}
    sent = dict.fromkeys(due, 0.0)
    now = 0.0
    while len(done) < len(due):
        before = now
        now = min([now + longest_step, *(e for e in edges if e > now)])
        ready: dict[str, float] = {}
        for name in due:
            if name[0] == "c":
                ready[name] = due[name] if before >= ends[name] else 0.0
            else:
                start, seconds, bits, _ = flows[int(name[1:])]
                share = min(1.0, max(0.0, (now - start) / seconds))
                ready[name] = due[name] if before >= ends[name] else bits * share
        bps = 100.0 if change is None or before < change[0] else change[1]
        left = bps * (now - before)
        while left > 1e-9:
            hungry = [n for n in due if ready[n] - sent[n] > 1e-9]
            if not hungry:
                break
            each = left / len(hungry)
            for name in hungry:
                part = min(each, ready[name] - sent[name])
                sent[name] += part
                left -= part
        for name in due:
            if name not in done and now >= ends[name] and sent[name] >= due[name] - 1e-6:
                done[name] = now
    return done
