from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.pages import page_data
from tests.cli.runner import Result

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
RUN = (CASE_STUDY, "--requests", 400)
Prfaas = Callable[..., Result]


def trace(tmp_path: Path, *changes: dict[str, object], rows: int = 120) -> Path:
    """Conversations of a few turns; `changes` go to the first rows."""
    lines = []
    for k in range(rows):
        blocks = [1000 * (k % 40) + b for b in range(4 + 4 * (k // 40))]
        row: dict[str, object] = {
            "timestamp": 400 * k,
            "input_length": 512 * len(blocks),
            "output_length": 100,
            "hash_ids": blocks,
        }
        if k < len(changes):
            row |= changes[k]
        lines.append(json.dumps({key: value for key, value in row.items() if value is not None}))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_json_has_the_promised_keys(prfaas: Prfaas) -> None:
    result = prfaas("simulate", *RUN, "--policy", "paper", "--policy", "adaptive", "--json")
    assert result.code == 0, result.err
    report = result.json
    assert set(report) == {"runs", "wall_s"}
    assert list(report["runs"]) == ["paper", "adaptive"]
    for run in report["runs"].values():
        assert set(run) >= {
            "throughput_rps",
            "goodput_rps",
            "ttft_s",
            "tpot_s",
            "egress_gbps",
            "offload_fraction",
            "hit_rate",
            "utilisation",
            "plan_changes",
            "stable",
        }
        assert set(run["ttft_s"]) == {"mean", "p50", "p90", "p99"}
        assert set(run["egress_gbps"]) == {"mean", "peak"}
        assert 0 < run["goodput_rps"] <= run["throughput_rps"]
        assert run["tpot_s"] == pytest.approx(0.025)


def test_several_values_may_follow_one_flag(prfaas: Prfaas) -> None:
    few = (CASE_STUDY, "--requests", 50, "--json")
    repeated = prfaas("simulate", *few, "--policy", "local", "--policy", "remote")
    at_once = prfaas("simulate", "--policy", "local", "remote", *few)
    assert repeated.json["runs"] == at_once.json["runs"]
    assert list(at_once.json["runs"]) == ["local", "remote"]
    wrong = prfaas("simulate", *few, "--policy", "local", "fastest")
    assert wrong.code == 2


def test_a_seed_repeats_itself_and_another_differs(prfaas: Prfaas) -> None:
    def runs(seed: int) -> object:
        return prfaas("simulate", *RUN, "--seed", seed, "--json").json["runs"]

    assert runs(1) == runs(1)
    assert runs(1) != runs(2)


def test_baselines_stand_beside_published_ratios(prfaas: Prfaas) -> None:
    arguments = ("simulate", *RUN, "--baseline", "homogeneous", "--baseline", "naive")
    shown = prfaas(*arguments)
    assert shown.code == 0, shown.err
    assert "1.54x" in shown.out and "1.32x" in shown.out
    assert "homogeneous PD: unstable" in shown.out.replace("\n", " ")
    assert "pd_p falls behind by" in shown.out
    report = prfaas(*arguments, "--json").json
    assert set(report["runs"]) == {"paper", "homogeneous", "naive"}
    assert report["runs"]["homogeneous"]["stable"] is False
    assert report["runs"]["homogeneous"]["behind"]["stage"] == "pd_p"
    saturated = report["saturated"]
    assert saturated["homogeneous"]["published_ratio"] == 1.54
    assert saturated["homogeneous"]["prfaas_over_this"] == pytest.approx(1.54, rel=0.1)
    assert saturated["naive"]["prfaas_over_this"] == pytest.approx(1.32, rel=0.1)
    for system in saturated.values():
        without, waited = system["ttft_mean_without_queueing_s"], system["ttft_mean_s"]
        assert 0 < without < waited


def test_a_trace_brings_its_requests_times_and_prefixes(prfaas: Prfaas, tmp_path: Path) -> None:
    path = trace(tmp_path)
    run = prfaas("simulate", CASE_STUDY, "--trace", path, "--json").json["runs"]["paper"]
    assert run["requests"] == 120
    assert 0.2 < run["hit_rate"] < 0.9
    faster = prfaas("simulate", CASE_STUDY, "--trace", path, "--speedup", 3, "--json")
    ratio = faster.json["runs"]["paper"]["throughput_rps"] / run["throughput_rps"]
    assert ratio == pytest.approx(3, rel=0.2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": None}, "timestamp"),
        ({"output_length": None}, "output_length"),
        ({"timestamp": -5}, "negative"),
        ({"timestamp": 900}, "earlier than the one before"),
        ({"output_length": 2_000_000}, "exceed the 1048576 of the model"),
        ({"input_length": 0}, "input_length is 0"),
        ({"hash_ids": [1]}, "1 hash_ids"),
        ({"timestamp": "soon"}, "timestamp"),
    ],
)
def test_a_wrong_trace_is_one_line_and_exit_code_2(
    prfaas: Prfaas, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    path = trace(tmp_path, change)
    result = prfaas("simulate", CASE_STUDY, "--trace", path)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert says in result.err and str(path) in result.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--load", "0"), "--load"),
        (("--load", "nan"), "--load"),
        (("--requests", "1"), "--requests"),
        (("--speedup", "2"), "--speedup"),
        (("--trace", "t.jsonl", "--load", "1"), "--trace"),
        (("--trace", "absent.jsonl"), "absent.jsonl: no such file"),
        (("--link-trace", "absent.csv"), "absent.csv: no such file"),
    ],
)
def test_wrong_flags_are_named(prfaas: Prfaas, arguments: tuple[str, ...], says: str) -> None:
    result = prfaas("simulate", CASE_STUDY, *arguments)
    assert result.code == 2
    assert says in result.err


def test_a_link_trace_slows_the_link(prfaas: Prfaas, tmp_path: Path) -> None:
    links = tmp_path / "links.csv"
    links.write_text("at_s,gbps\n0,4\n")
    arguments = ("simulate", *RUN, "--policy", "remote", "--load", 1, "--json")
    free = prfaas(*arguments).json["runs"]["remote"]
    slow = prfaas(*arguments, "--link-trace", links).json["runs"]["remote"]
    assert slow["ttft_s"]["mean"] > 2 * free["ttft_s"]["mean"]
    assert slow["egress_gbps"]["peak"] <= 4.01
    links.write_text("0,4,nowhere,pd\n")
    wrong = prfaas(*arguments, "--link-trace", links)
    assert wrong.code == 2 and "prfaas,pd" in wrong.err


def test_plots_and_timeline_are_written(prfaas: Prfaas, tmp_path: Path) -> None:
    timeline = tmp_path / "deep" / "run.json"
    result = prfaas("simulate", *RUN, "--plot", tmp_path / "plots", "--timeline", timeline)
    assert result.code == 0, result.err
    for name in ("ttft_cdf.png", "over_time.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "b"}
    assert {"prefill", "decode"} <= names


def test_a_goal_of_the_file_counts_as_the_promise(prfaas: Prfaas, tmp_path: Path) -> None:
    strict = tmp_path / "strict.toml"
    strict.write_text(
        CASE_STUDY.read_text().replace("[slo]", "[slo]\nttft_s = 0.5\nttft_quantile = 0.9")
    )
    run = prfaas("simulate", strict, "--requests", 600, "--json").json["runs"]["paper"]
    assert run["goodput_rps"] < 0.3 * run["throughput_rps"]


def test_a_baseline_that_cannot_be_made_says_why(prfaas: Prfaas, tmp_path: Path) -> None:
    alone = tmp_path / "alone.toml"
    text = CASE_STUDY.read_text()
    start, stop = (
        text.index('[[clusters]]\nname = "prfaas"'),
        text.index('[[clusters]]\nname = "pd"'),
    )
    text = text[:start] + text[stop:]
    start, stop = text.index("[[links]] # VPC"), text.index("[[links]] # RDMA")
    alone.write_text(text[:start] + text[stop:])
    result = prfaas("simulate", alone, "--baseline", "naive")
    assert result.code == 2
    assert "no prfaas cluster" in result.err


def test_several_pd_clusters_are_shown_per_cluster_and_per_link(prfaas: Prfaas) -> None:
    run = ("simulate", CASE_STUDY.with_name("two_by_two.toml"), "--requests", 200)
    report = prfaas(*run, "--policy", "paper", "--json").json["runs"]["paper"]
    assert [pd["cluster"] for pd in report["pd_clusters"]] == ["east", "west"]
    assert sum(pd["requests"] for pd in report["pd_clusters"]) == 200
    served = sum(pd["throughput_rps"] for pd in report["pd_clusters"])
    assert served == pytest.approx(report["throughput_rps"])
    assert [one["cluster"] for one in report["prfaas_clusters"]] == ["north", "south"]
    ends = {(link["source"], link["target"]) for link in report["links"]}
    assert ends == {(a, b) for a in ("north", "south") for b in ("east", "west")}
    carried = sum(link["gbps"] for link in report["links"])
    assert carried == pytest.approx(report["egress_gbps"]["mean"])
    for one in report["prfaas_clusters"]:
        of = [link["prefills_rps"] for link in report["links"] if link["source"] == one["cluster"]]
        assert one["prefills_rps"] == pytest.approx(sum(of))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--baseline", "naive"), "baselines have one pd cluster"),
        (("--trace", "none.jsonl"), "at which of several pd clusters"),
    ],
)
def test_what_needs_one_pd_cluster_says_so(
    prfaas: Prfaas, flags: tuple[str, str], words: str
) -> None:
    result = prfaas("simulate", CASE_STUDY.with_name("two_by_two.toml"), *flags)
    assert result.code == 2 and words in result.err


def test_a_link_trace_of_an_unknown_link_names_the_links(prfaas: Prfaas, tmp_path: Path) -> None:
    two_by_two = CASE_STUDY.with_name("two_by_two.toml")
    trace = tmp_path / "links.csv"
    trace.write_text("10,0,north,nowhere\n")
    result = prfaas("simulate", two_by_two, "--requests", "2", "--link-trace", trace)
    assert result.code == 2
    assert "there is no link north,nowhere from a prfaas cluster; name one of" in result.err
    assert "north,east; south,east; north,west; south,west" in result.err


def test_a_page_replays_the_runs(prfaas: Prfaas, tmp_path: Path) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("20,0\n40,100\n")
    page = tmp_path / "new" / "report.html"
    options = ("--policy", "paper", "adaptive", "--baseline", "homogeneous")
    shown = prfaas("simulate", *RUN, *options, "--link-trace", rates, "--html", page)
    assert shown.code == 0, shown.err
    assert f"wrote {page}" in shown.out.replace("\n", " ")
    data = page_data(page)
    assert data["kind"] == "simulation"
    assert data["title"].startswith("case-study-1t, Poisson arrivals, ")
    assert [run["name"] for run in data["runs"]] == ["paper", "adaptive", "homogeneous PD"]
    assert data["tables"][0]["title"].startswith("saturated")
    for run in data["runs"]:
        assert [label for label, _ in run["summary"]] == data["summary_labels"]
        assert sum(home["arrived"][-1] for home in run["homes"]) == 400
    summary = dict(data["runs"][0]["summary"])
    assert summary["throughput (req/s)"] in shown.out
    cut = [e for e in data["runs"][1]["events"] if e["text"] == "The link prfaas -> pd is cut."]
    assert [event["at_s"] for event in cut] == [20]
    assert data["runs"][2]["links"] == []


def test_json_names_the_page(prfaas: Prfaas, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    without = prfaas("simulate", *RUN, "--json").json["runs"]
    found = prfaas("simulate", *RUN, "--html", page, "--json").json
    assert found["written"] == [str(page)]
    assert found["runs"] == without, "the page changes no figure"


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_page_that_cannot_be_written_is_refused_first(
    prfaas: Prfaas, tmp_path: Path, command: str
) -> None:
    for path in (Path("/dev/null/report.html"), tmp_path):
        refused = prfaas(command, CASE_STUDY, "--html", path)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.startswith(f"error: {path}: --html: cannot write the file: ")
    wrong = prfaas(command, tmp_path / "none.toml", "--html", tmp_path / "report.html")
    assert wrong.code == 2
    assert not (tmp_path / "report.html").exists(), "no empty file is left"
