from __future__ import annotations

import numpy as np
import pytest

from prfaas.cache.replay import block_hashes
from prfaas.config.trace import TraceRow
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.config import CacheConfig, SimConfig, link_id
from prfaas_lab.studies.stress import STRESSES, burst, hot_prefix, node_lost, sagging_link
from tests.planner.builders import problem

PROBLEM = problem()
CONFIG = SimConfig(cache=CacheConfig(1e12))


def calm(count: int = 3000) -> Arrivals:
    rows = [TraceRow(0.0, 600, 10, [k, k + count]) for k in range(count)]
    return Arrivals(
        at_s=np.arange(count, dtype=float) / 2,
        prompt_tokens=np.full(count, 600),
        cached_tokens=np.zeros(count, dtype=np.int64),
        output_tokens=np.full(count, 10),
        hashes=[block_hashes(row) for row in rows],
    )


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", STRESSES)
def test_the_same_seed_gives_the_same_stress_in_order(name: str) -> None:
    first, first_config = STRESSES[name](PROBLEM, calm(), CONFIG, rng())
    second, second_config = STRESSES[name](PROBLEM, calm(), CONFIG, rng())
    assert first_config == second_config
    assert first.at_s.tolist() == second.at_s.tolist()
    assert first.hashes == second.hashes
    assert np.all(np.diff(first.at_s) >= 0)
    assert len(first) == len(calm())


def test_the_link_sags_for_a_fifth_of_the_time() -> None:
    _, config = sagging_link(PROBLEM, calm(), CONFIG, rng())
    changes = config.links[link_id(PROBLEM, 0)]
    assert [c.share for c in changes] == [0.1, 1.0] * (len(changes) // 2)
    starts = [c.at_s for c in changes[::2]]
    assert np.diff(starts) == pytest.approx(300.0)
    assert [c.at_s for c in changes[1::2]] == pytest.approx([s + 60 for s in starts])


def test_a_burst_is_five_times_the_rate_for_thirty_seconds() -> None:
    arrivals, _ = burst(PROBLEM, calm(), CONFIG, rng())
    per_s, _ = np.histogram(arrivals.at_s, bins=np.arange(0, arrivals.at_s[-1] + 10, 10))
    assert per_s.max() == pytest.approx(5 * np.median(per_s), rel=0.06)
    assert (per_s > 2 * np.median(per_s)).sum() in (3, 4)
    assert calm().at_s[-1] - arrivals.at_s[-1] == pytest.approx(120.0)


def test_one_prfaas_node_is_lost_for_good() -> None:
    _, config = node_lost(PROBLEM, calm(), CONFIG, rng())
    (fault,) = config.faults
    assert fault.node.startswith("far-")
    assert fault.until_s == float("inf")


def test_a_hot_prefix_is_shared_and_renames_what_follows() -> None:
    before = calm()
    after, _ = hot_prefix(PROBLEM, before, CONFIG, rng())
    assert before.hashes is not None and after.hashes is not None
    pairs = zip(before.hashes, after.hashes, strict=True)
    changed = [index for index, (a, b) in enumerate(pairs) if a != b]
    assert len(changed) == pytest.approx(2 / 3 / 3 * len(before), rel=0.15)
    assert len({after.hashes[k][:24] for k in changed}) == 1
    assert len({after.hashes[k][24:] for k in changed}) == len(changed)
    assert set((after.prompt_tokens - before.prompt_tokens)[changed]) == {24 * 512}
