"""From a running node to a plan: what `profile` writes, others read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prfaas.catalog import Catalog
from prfaas.contracts.readiness import NodeReady
from prfaas.engine.api import EngineJob, EngineLimits, Prefilled, Sampling
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.emulated import EmulatedEngine, EmulatedModel
from prfaas.kvspec import GQA, build_spec
from prfaas.planner.instance_times import prefill_profile
from prfaas.planner.profile import DecodeStep
from tests.cli.runner import Result
from tests.engine.watching import Watched
from tests.node.hosts import Process

Run = Callable[..., Result]
DEPLOYMENT = """
catalog = ["profile.toml"]
[model]
name = "tiny"
config = "tiny/config.json"
[workload]
kind = "lognormal"
mu = 3.0
sigma = 0.5
min_tokens = 8
max_tokens = 64
output_tokens = 16
[slo]
output_tokens_per_s = 0.01
[[clusters]]
name = "far"
kind = "prfaas"
accelerator = "this-machine"
gpus = 2
gpus_per_instance = 1
[[clusters]]
name = "near"
kind = "pd"
accelerator = "this-machine"
gpus = 4
gpus_per_instance = 1
[[links]]
from = "far"
to = "near"
gbps = 1
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("profiled") / "tiny", "qwen3").directory


@pytest.fixture(scope="module")
def url(tiny: Path) -> Iterator[str]:
    node = Process(
        *("node", "--model", str(tiny), "--device", "cpu", "--set", "node.block_tokens=16"),
        *("--", "--memory", "64MiB"),
    )
    yield node.ready(NodeReady).http
    node.stop()


def test_planner_and_emulated_engine_read_the_file(prfaas: Run, tiny: Path, url: str) -> None:
    out = tiny.parent / "profile.toml"
    arguments = ("--lengths", "16,48", "--cached", "32", "--batches", "1,2", "--rounds", "2")
    shown = prfaas(
        "profile", "--url", url, *arguments, "--accelerator", "this-machine", "--out", out
    )
    assert shown.code == 0
    text = " ".join(shown.out.split())  # the width of the terminal decides where lines break
    assert "tiny on this-machine" in text and "decode after 16 tokens" in text

    (tiny.parent / "deployment.toml").write_text(DEPLOYMENT)
    plan = prfaas("plan", tiny.parent / "deployment.toml", "--json").json
    assert plan["prfaas_pd"]["lambda_max_rps"] > 0

    catalog = Catalog.builtin().extended([out])
    record = catalog.profile("tiny", "this-machine", 1)
    assert record is not None and record.provenance.startswith("measured: prfaas profile over ")
    assert "median of 2" in record.source
    engine = EmulatedEngine(
        EmulatedModel(
            record.model,
            build_spec([GQA((0,), 1, 1, 1)]),
            prefill_profile(catalog, record),
            [DecodeStep(point.batch, point.step_s) for point in record.decode],
        ),
        limits=EngineLimits(max_tokens=100, vocab_size=10, max_running=2, max_waiting=2),
        block_tokens=64,
    )
    try:
        done = Watched(engine, EngineJob("one", [1, 2, 3] * 12, Sampling(max_tokens=3)))
        assert len(done.tokens) == 3 and done.prefilled == Prefilled(0, 36, 0)
    finally:
        engine.close()


def test_one_length_recalibrates_a_plan(prfaas: Run, tiny: Path, url: str) -> None:
    out = tiny.parent / "one_length.toml"
    arguments = ("--lengths", "64", "--batches", "", "--rounds", "1", "--accelerator", "h20")
    assert prfaas("profile", "--url", url, *arguments, "--out", out).code == 0
    text = DEPLOYMENT.replace("this-machine", "h20").replace("profile.toml", out.name)
    (tiny.parent / "on_h20.toml").write_text(text)
    plan = prfaas("plan", tiny.parent / "on_h20.toml", "--json").json
    assert [(e["cluster"], e["what"]) for e in plan["estimated"]] == [
        ("far", "prefill"),
        ("near", "prefill"),
        ("near", "decode"),
    ]
    corrected = ["known times of tiny on 1 x h20" in e["provenance"] for e in plan["estimated"]]
    assert corrected == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "1K,2K"), "--lengths: '1K,2K' is not a list of numbers"),
        (("--rounds", "0"), "--rounds: 0"),
        (("--out", "nowhere/at/all.toml"), "nowhere/at: no such directory"),
    ],
)
def test_mistakes_are_one_line(prfaas: Run, arguments: tuple[str, ...], message: str) -> None:
    result = prfaas("profile", "--url", "http://127.0.0.1:9", *arguments)
    assert result.code == 2
    assert message in result.err.splitlines()[-1] and not result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --url and --estimate"),
        (("--url", "http://127.0.0.1:9", "--estimate", "x"), "exactly one of --url and --estimate"),
        (("--url", "http://127.0.0.1:9"), "--accelerator: required with --url"),
        (
            ("--url", "http://127.0.0.1:9", "--accelerator", "h20"),
            "check that the server is running",
        ),
    ],
)
def test_servers_that_cannot_be_measured(
    prfaas: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = prfaas("profile", *arguments)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1


def test_an_estimated_profile(prfaas: Run, tmp_path: Path) -> None:
    where = ("--accelerator", "h200", "--gpus", "8")
    numbers = ("--lengths", "1024,8192", "--cached", "4096", "--batches", "1,100000")
    command = ("profile", "--estimate", "deepseek-v3", *where, *numbers)
    report = prfaas(*command, "--json").json
    assert report["status"] == "estimated"
    times = {(p["new"], p["cached"]): p["t_prefill_s"] for p in report["prefill"]}
    assert times[1024, 0] < times[1024, 4096] < times[8192, 0] < times[8192, 4096]
    assert [step["batch"] for step in report["decode"]] == [1]  # the other batch does not fit
    assert report["memory"]["kv_bytes"] > 0
    out = tmp_path / "estimate.toml"
    shown = " ".join(prfaas(*command, "--out", out).out.split())
    assert "GB for KV" in shown and "estimated: counted work" in shown
    (record,) = [r for r in Catalog.builtin().extended([out]).profiles if r.status == "estimated"]
    assert record.model == "deepseek-v3" and len(record.prefill) == 4


def test_an_estimated_profile_of_a_config(prfaas: Run, tiny: Path) -> None:
    command = ("profile", "--estimate", tiny / "config.json", "--accelerator", "h20")
    assert prfaas(*command, "--json").json["model"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("deepseek-v3",), "--accelerator: required with --estimate"),
        (("deepseek-v3", "--accelerator", "h20", "--gpus", "4"), "do not fit into"),
        (("nothing", "--accelerator", "h200"), "unknown model 'nothing'"),
        (("qwen3-4b", "--accelerator", "h200", "--lengths", "0"), "0"),
    ],
)
def test_profiles_that_cannot_be_estimated(
    prfaas: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = prfaas("profile", "--estimate", *arguments)
    assert result.code == 2 and message in result.err
    assert len(result.err.splitlines()) == 1
