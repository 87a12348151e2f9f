"""Small planning problems, and the paper's."""

from __future__ import annotations

from pathlib import Path as FilePath

from prfaas.config import load_deployment
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.planner.problem import Local, Path, Pool, Problem, Remote
from prfaas.planner.profile import DecodeRate, PrefillProfile, PrefillTime
from prfaas.planner.workload import Workload, lognormal
from prfaas.studies.problem_files import Study

CASE_STUDY = FilePath(__file__).parents[2] / "configs" / "case_study.toml"
SPEC = KVSpec((FullAttention("full0", (0,), 1000), LinearState("linear0", (1,), 50_000)))


def profile(*times: tuple[int, float]) -> PrefillProfile:
    return PrefillProfile([PrefillTime(new, 0, s) for new, s in times], provenance="measured: test")


FAST = profile((100, 0.1), (1000, 0.5), (10_000, 8.0))
SLOW = profile((100, 0.2), (1000, 1.4), (10_000, 25.0))


def pool(name: str, instances: int, times: PrefillProfile, usd: float | None = 1.0) -> Pool:
    return Pool(name, name, instances, 1, times, usd)


def problem(
    workload: Workload | None = None,
    *,
    prfaas: int = 2,
    pd: int = 4,
    bps: float = 1e8,
    bs_max: int = 4,
    t_decode_s: float = 0.02,
    fabric: Path | None = None,
    fixed_prefill: int | None = None,
    fixed_threshold: int | None = None,
) -> Problem:
    return Problem(
        spec=SPEC,
        workload=workload or lognormal(6.5, 1.0, 20, 5000, output_tokens=100),
        remotes=(Remote(pool("far", prfaas, FAST, usd=2.0), Path(bps, 0.01)),) if prfaas else (),
        local=Local(pool("near", pd, SLOW), DecodeRate(bs_max, t_decode_s), fabric, fixed_prefill),
        fixed_threshold=fixed_threshold,
    )


def case_study() -> Problem:
    return Study(CASE_STUDY, "paper").problem(load_deployment(CASE_STUDY))
