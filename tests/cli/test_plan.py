from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.studies.sweep import parse_sweep
from tests.cli.pages import page_data
from tests.cli.runner import Result

Run = Callable[..., Result]
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
PUBLISHED = CASE_STUDY.with_suffix(".published.toml")
KEYS = {
    "threshold_tokens",
    "n_prfaas",
    "n_prefill",
    "n_decode",
    "theta_rps",
    "lambda_max_rps",
    "offload_fraction",
    "egress_gbps",
    "ttft_mean_s",
    "ttft_p90_s",
}


def edited(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = CASE_STUDY.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "deployment.toml"
    path.write_text(text)
    return path


def test_json_has_what_programs_read(prfaas: Run) -> None:
    for reading in ("paper", "exact"):
        plan = prfaas("plan", CASE_STUDY, "--reading", reading, "--json").json
        assert plan["reading"] == reading
        for system in ("prfaas_pd", "homogeneous", "naive", "equal_cost"):
            assert set(plan[system]) >= KEYS
            assert set(plan[system]["theta_rps"]) == {"prfaas", "pd_p", "pd_d"}
            assert ("stable_at_paper_lambda" in plan[system]) == (reading == "exact")
        assert set(plan["ratios"]) == {
            "prfaas_over_homogeneous",
            "naive_over_homogeneous",
            "prfaas_over_naive",
            "prfaas_over_equal_cost",
        }


def test_the_loss_of_the_site_is_shown(prfaas: Run) -> None:
    (lost,) = prfaas("plan", CASE_STUDY, "--json").json["lost_sites"]
    assert lost["cluster"] == "prfaas" and lost["rate_rps"] == pytest.approx(1.407, rel=1e-3)
    (home,) = lost["pd_clusters"]
    assert home == {"cluster": "pd", "split": {"prefill": 6, "decode": 2}, "alone": False}
    words = "Without prfaas or its link: 1.41 requests/s of 3.24 (43%): 3 decode nodes become"
    assert words in " ".join(prfaas("plan", CASE_STUDY).out.split())


def test_a_sweep_reoptimises_at_each_value(prfaas: Run) -> None:
    swept = prfaas("plan", CASE_STUDY, "--sweep", "links.0.gbps=5,8,10,100", "--json").json
    assert [point["value"] for point in swept["sweep"]] == [5, 8, 10, 100]
    rates = [point["prfaas_pd"]["lambda_max_rps"] for point in swept["sweep"]]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    for point in swept["sweep"]:
        assert point["prfaas_pd"]["egress_gbps"] <= point["value"] * (1 + 1e-9)
    # The last value is the file's own.
    assert swept["sweep"][-1]["prfaas_pd"] == swept["prfaas_pd"]


def test_a_sweep_over_names_and_absent_sections(prfaas: Run) -> None:
    by_threshold = prfaas(
        "plan", CASE_STUDY, "--sweep", "scheduler.threshold_tokens=1000,40000", "--json"
    ).json
    assert [p["prfaas_pd"]["threshold_tokens"] for p in by_threshold["sweep"]] == [1000, 40000]
    result = prfaas("plan", CASE_STUDY, "--sweep", "model.name=case-study-1t,kimi-k3")
    assert result.code == 2 and "kimi-k3 on 8 x H200 SXM: " in result.err


def test_tables_and_comparison_for_people(prfaas: Run) -> None:
    out = prfaas("plan", CASE_STUDY, "--compare", PUBLISHED, "--sweep", "links.0.gbps=5,100").out
    assert "19,412" in out and "1.54x" in out
    assert "re-optimised over links.0.gbps" in out
    line = next(line for line in out.splitlines() if "ttft_mean_s" in line)
    assert re.search(r"2\.225\s+2\.22\s+\+0\.2%", line)
    assert "extrapolated" in out


def test_the_comparison_as_json(prfaas: Run) -> None:
    rows = prfaas("plan", CASE_STUDY, "--compare", PUBLISHED, "--json").json["comparison"]
    found = {(row["system"], row["quantity"]): row for row in rows}
    row = found["naive", "lambda_max_rps"]
    assert row["published"] == 2.45
    assert row["difference"] == pytest.approx(row["ours"] / 2.45 - 1)
    assert ("ratios", "prfaas_over_equal_cost") in found


def test_the_exact_table_says_what_is_unstable(prfaas: Run) -> None:
    out = prfaas("plan", CASE_STUDY, "--reading", "exact", "--load", "2.2").out
    assert "unstable at 2.20 req/s" in out.replace("\n", " ")
    assert "TTFT P99" in out


def test_plots_are_written(prfaas: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "plots"
    sweep = "links.0.gbps=5,100"
    report = prfaas("plan", CASE_STUDY, "--sweep", sweep, "--plot", folder, "--json").json
    names = ["fig2_kv_throughput.png", "fig5a_split.png", "fig5b_threshold.png"]
    names += ["gain_map.png", "sweep.png"]
    assert report["plots"] == [str(folder / name) for name in names]
    for name in names:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_a_map_shows_where_prfaas_begins_to_pay(prfaas: Run) -> None:
    report = prfaas("plan", CASE_STUDY, "--map", "--json").json
    assert report["map"]["own"]["over_homogeneous"] == pytest.approx(
        report["ratios"]["prfaas_over_homogeneous"]
    )
    text = prfaas("plan", CASE_STUDY, "--map").out
    assert "pays from" in text and "3.5" in text and "never" in text
    assert "this deployment: 100 Gbit/s, 27,486 tokens per prompt" in text


def test_a_trace_as_workload(prfaas: Run, tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": i,
            "input_length": 4096 * (1 + i % 9),
            "output_length": 100,
            "hash_ids": [i % 5, *range(1000 * i, 1000 * i + 8 * (1 + i % 9) - 1)],
        }
        for i in range(200)
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "t.jsonl").write_text(text)
    with lzma.open(tmp_path / "t.jsonl.xz", "wt") as stream:
        stream.write(text)
    original = CASE_STUDY.read_text()
    block = original[original.index("[workload]") : original.index("[slo]")]
    plans = []
    for name in ("t.jsonl", "t.jsonl.xz"):
        section = f'[workload]\nkind = "trace"\npath = "{name}"\n\n'
        plans.append(prfaas("plan", edited(tmp_path, (block, section)), "--json").json)
    assert plans[0] == plans[1]
    assert plans[0]["prfaas_pd"]["lambda_max_rps"] > 0

    (tmp_path / "t.jsonl").write_text(text + "\nnonsense\n")
    section = '[workload]\nkind = "trace"\npath = "t.jsonl"\n\n'
    result = prfaas("plan", edited(tmp_path, (block, section)))
    assert result.code == 2
    assert "t.jsonl: line 201: not JSON" in result.err
    (tmp_path / "t.jsonl.xz").write_bytes(b"not xz")
    section = '[workload]\nkind = "trace"\npath = "t.jsonl.xz"\n\n'
    assert "not an intact .xz" in prfaas("plan", edited(tmp_path, (block, section))).err


def test_a_mixture_as_workload(prfaas: Run, tmp_path: Path) -> None:
    original = CASE_STUDY.read_text()
    block = original[original.index("[workload]") : original.index("[slo]")]
    part = "{ weight = %s, mu = %s, sigma = 0.8, min_tokens = 100, max_tokens = 100000 }"
    section = (
        '[workload]\nkind = "mixture"\noutput_tokens = 500\n'
        f"components = [{part % (3, 7)}, {part % (1, 10.5)}]\n\n"
    )
    plan = prfaas("plan", edited(tmp_path, (block, section)), "--json").json
    assert 0 < plan["prfaas_pd"]["offload_fraction"] < 0.5


def on_estimates(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The case study's hardware with a model that has no profile on the H20."""
    return edited(tmp_path, ('"case-study-1t"', '"qwen3-235b-a22b"'), *changes)


def test_a_plan_from_estimates_has_ranges(prfaas: Run, tmp_path: Path) -> None:
    path = on_estimates(tmp_path)
    plan = prfaas("plan", path, "--json").json
    assert [(e["cluster"], e["what"]) for e in plan["estimated"]] == [
        ("pd", "prefill"),
        ("pd", "decode"),
    ]
    assert all(e["provenance"].startswith("estimated: ") for e in plan["estimated"])
    for name in ("lambda_max_rps", "threshold_tokens", "n_prefill", "ttft_p90_s"):
        found = plan["ranges"][name]
        assert found["low"] <= plan["prfaas_pd"][name] * 1.01 <= found["high"] * 1.03
    gain = plan["ranges"]["prfaas_over_homogeneous"]
    assert gain["low"] <= plan["ratios"]["prfaas_over_homogeneous"] <= gain["high"]
    best = plan["narrow_with"]
    assert best["cluster"] == "pd" and best["before"] == gain
    assert best["command"].startswith("prfaas profile --url http://HOST:PORT --accelerator h20")
    out = prfaas("plan", path).out
    text = " ".join(out.split())
    assert "the prefill times of qwen3-235b-a22b on 8 x h20 are estimated" in text
    assert f"({gain['low']:.2f}-{gain['high']:.2f}) as many GPUs" in text
    assert "The measurement that narrows this most: qwen3-235b-a22b on 8 x h20" in text


def test_decode_that_is_estimated_too_slow_is_refused(prfaas: Run, tmp_path: Path) -> None:
    result = prfaas("plan", on_estimates(tmp_path, ("per_s = 40", "per_s = 4000")))
    assert result.code == 2
    assert "slo.output_tokens_per_s: no decode batch gives 4000 tokens/s" in result.err
    assert "the fastest estimated step, of batch 1, gives" in result.err


def test_a_plan_from_profiles_has_no_ranges(prfaas: Run) -> None:
    plan = prfaas("plan", CASE_STUDY, "--json").json
    assert (plan["estimated"], plan["ranges"], plan["narrow_with"]) == ([], None, None)


def test_a_measured_point_of_ones_own_recalibrates(prfaas: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        [[profiles]]
        model = "qwen3-235b-a22b"
        accelerator = "h20"
        gpus = 8
        status = "measured"
        source = "our lab"
        prefill = [{ new = 32768, seconds = 9.0 }]
        """
    )
    without = prfaas("plan", on_estimates(tmp_path), "--json").json
    path = on_estimates(tmp_path, ("[model]", 'catalog = ["mine.toml"]\n[model]'))
    plan = prfaas("plan", path, "--json").json
    errors = [p["estimated"][0]["log_error"] for p in (without, plan)]
    assert errors[1] < errors[0]
    assert "after known times of qwen3-235b-a22b on 8 x h20" in plan["estimated"][0]["provenance"]
    assert plan["homogeneous"]["theta_rps"]["pd_p"] != without["homogeneous"]["theta_rps"]["pd_p"]


def test_a_model_without_matrices_is_refused(prfaas: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        [[models]]
        name = "mine"
        layers = 4
        status = "published"
        source = "us"
        [[models.groups]]
        kind = "gqa"
        layers = "all"
        kv_heads = 4
        k_dim = 128
        v_dim = 128
        """
    )
    changes = ("[model]", 'catalog = ["mine.toml"]\n[model]'), ('"case-study-1t"', '"mine"')
    result = prfaas("plan", edited(tmp_path, *changes))
    assert result.code == 2
    assert "clusters.0.accelerator: the catalog does not have the matrices of mine" in result.err
    assert "add [models.shape] to its entry" in result.err


def test_a_config_json_is_estimated(prfaas: Run, tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        **{"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ('"case-study-1t"', '"mine"\nconfig = "config.json"')
    plan = prfaas("plan", edited(tmp_path, model), "--json").json
    assert [e["cluster"] for e in plan["estimated"]] == ["prfaas", "pd", "pd"]
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = prfaas("plan", edited(tmp_path, model))
    assert result.code == 2 and "config.json: vocab_size" in result.err


def test_hardware_of_ones_own(prfaas: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        """
        [[accelerators]]
        name = "x1"
        [[profiles]]
        model = "case-study-1t"
        accelerator = "x1"
        gpus = 4
        status = "measured"
        source = "our lab"
        prefill = [{ new = 1000, seconds = 0.2 }, { new = 100000, seconds = 3.0 }]
        """
    )
    path = edited(
        tmp_path,
        ("[model]", 'catalog = ["mine.toml"]\n[model]'),
        (
            'accelerator = "h200"\ngpus = 32\ngpus_per_instance = 8',
            'accelerator = "x1"\ngpus = 32\ngpus_per_instance = 4',
        ),
    )
    plan = prfaas("plan", path, "--json").json
    assert plan["prfaas_pd"]["n_prfaas"] == 8
    assert plan["equal_cost"] is None  # the file does not state the price of an x1
    assert plan["ratios"]["prfaas_over_equal_cost"] is None
    assert "a price is unknown" in prfaas("plan", path).out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gbps = 100", "gbps = 0", "links.0.gbps: expected `float` > 0.0, got 0"),
        ("gbps = 100", "gbps = nan", "links.0.gbps: is nan"),
        ("gbps = 100", "gpbs = 100", "links.0.gpbs: unknown key; did you mean 'gbps'"),
        ('name = "case-study-1t"', 'name = "case"', "model.name: unknown model 'case'"),
        ('"h200"', '"h201"', "clusters.0.accelerator: unknown accelerator 'h201'; did you mean"),
        ('"h200"', '"groq-lp30"', "clusters.0.accelerator: case-study-1t on 8 x Groq 3 LPU"),
        ("gpus_per_instance = 8", "gpus_per_instance = 4", "case-study-1t on 4 x H200 SXM: "),
        ("per_s = 40", "per_s = 400", "slo.output_tokens_per_s: no measured decode batch"),
        ("[scheduler]", "[scheduler]\nthreshold_tokens = 131073", "above the longest prompt"),
        ('"case-study-1t"', '"case-study-1t"\nkv_dtype = "int3"', "model.kv_dtype: unknown dtype"),
        ('"case-study-1t"', '"x"\nconfig = "none.json"', "none.json: no such file"),
        (
            '[[clusters]]\nname = "pd"',
            '[[clusters]]\nname = "pd2"\nkind = "pd"\naccelerator = "h20"\ngpus = 8\n'
            'gpus_per_instance = 8\n[[clusters]]\nname = "pd"',
            "clusters: no instance can prefill for pd2",
        ),
    ],
)
def test_bad_deployments(prfaas: Run, tmp_path: Path, old: str, new: str, message: str) -> None:
    path = edited(tmp_path, (old, new))
    result = prfaas("plan", path)
    assert result.code == 2
    assert message in result.err
    assert result.err.startswith(f"error: {tmp_path}")
    assert len(result.err.splitlines()) == 1 and not result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "2"), "--load: the paper reading has no queues"),
        (("--reading", "exact", "--load", "0"), "--load: 0.0 is not a rate"),
        (("--reading", "exact", "--load", "nan"), "--load: nan is not a rate"),
        (("--reading", "fuzzy"), "'fuzzy' is not one of"),
        (("--sweep", "links.0.gbps"), "--sweep: 'links.0.gbps' is not KEY=V1,V2"),
        (("--sweep", "links.7.gbps=3"), "--sweep: 'links.7.gbps' has no key '7'"),
        (("--sweep", "links.0.gbps.x=3"), "has no key 'x'"),
        (("--sweep", "links.0.gbps=5,fast"), "links.0.gbps: expected `float`, got 'fast'"),
        (("--sweep", "links.0.speed=5"), "links.0.speed: unknown key"),
        (("--sweep", "links.0.gbps=5,0"), "links.0.gbps: expected `float` > 0.0, got 0"),
        (("--compare", "none.toml"), "none.toml: no such file"),
        (("--compare", CASE_STUDY), "unknown key"),
        (("--plot", "/dev/null/x"), "--plot: cannot create the folder"),
    ],
)
def test_bad_flags(prfaas: Run, arguments: tuple[object, ...], message: str) -> None:
    result = prfaas("plan", CASE_STUDY, *arguments)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_sweep_values_are_read_as_toml() -> None:
    assert parse_sweep("a.b=1,2.5,x,true") == ("a.b", [1, 2.5, "x", True])


def test_a_missing_file(prfaas: Run, tmp_path: Path) -> None:
    result = prfaas("plan", tmp_path / "none.toml")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: {tmp_path}/none.toml: no such file; check the path\n"


TWO_BY_TWO = CASE_STUDY.with_name("two_by_two.toml")


def test_several_pd_clusters_are_planned_together(prfaas: Run) -> None:
    report = prfaas("plan", TWO_BY_TWO, "--json").json
    for cluster in report["clusters"]:
        assert {"threshold_tokens", "split", "rate_rps"} <= set(cluster)
    for flow in report["flows"]:
        assert {"from", "to", "rps", "gbps"} <= set(flow)
    assert report["binding"] and report["estimated"] == []
    out = " ".join(prfaas("plan", TWO_BY_TWO).out.split())
    assert "the link south -> east" in out
    assert [lost["cluster"] for lost in report["lost_sites"]] == ["north", "south"]
    for lost in report["lost_sites"]:
        assert f"Without {lost['cluster']} or its link: {lost['rate_rps']:.2f} requests/s" in out


def test_options_of_one_pd_cluster_are_refused_for_several(prfaas: Run) -> None:
    result = prfaas("plan", TWO_BY_TWO, "--map")
    assert result.code == 2
    assert "--map: this option is for deployments with one pd cluster" in result.err


@pytest.mark.parametrize("file", [CASE_STUDY, TWO_BY_TWO], ids=lambda file: file.name)
def test_a_page_shows_the_plan(prfaas: Run, tmp_path: Path, file: Path) -> None:
    page = tmp_path / "plan.html"
    shown = prfaas("plan", file, "--html", page)
    assert shown.code == 0, shown.err
    assert f"wrote {page}" in shown.out.replace("\n", " ")
    data = page_data(page)
    report = prfaas("plan", file, "--html", page, "--json").json
    assert report["html"] == str(page)
    rate = report["rate_rps"] if "rate_rps" in report else report["prfaas_pd"]["lambda_max_rps"]
    assert data["headline"].startswith(f"{rate:.2f} requests/s. Throughput")
    assert dict(data["summary"])["rate (requests/s)"] == f"{rate:.3f}"
    assert data["curves"] and data["tables"] and data["limits"]
    for table in data["tables"]:
        assert table["title"] in shown.out


def test_a_page_has_what_else_was_asked_for(prfaas: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    options = ("--sweep", "links.0.gbps=5,100", "--compare", PUBLISHED, "--map")
    assert prfaas("plan", CASE_STUDY, *options, "--html", page).code == 0
    data = page_data(page)
    titles = [table["title"] for table in data["tables"]]
    assert titles[1].startswith("compared with case_study.published.toml")
    assert titles[2] == "re-optimised over links.0.gbps"
    assert titles[3].startswith("gain over one PD cluster")
    assert data["curves"][-1]["x"] == [5, 100]
