"""What `prfaas init` writes and prints: files, commands, and credentials by what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.goldens.canonical import Golden
from tests.goldens.checkpoints import make_checkpoint
from tests.goldens.commands import prfaas, workplace
from tests.goldens.folders import described

CASE = ("--plan", "configs/case_study.toml")
RUNS: dict[str, tuple[object, ...]] = {
    "emulated": (*CASE, "--engine", "emulated", "--pd", "pd=d1,d2", "--prfaas", "prfaas=p1"),
    "vllm": (
        *CASE,
        *(
            "--engine",
            "vllm",
            "--model",
            "checkpoint",
            "--model-path",
            "/models/m",
            "--pd",
            "pd=10.0.0.1,10.0.0.2,10.0.0.2",
        ),
        *("--prfaas", "prfaas=fd00::1", "--gateway", "gw", "--tenant", "a", "--tenant", "b"),
        *("--memory", "64GiB", "--all-addresses", "--days", 30),
    ),
    "hf": (
        *CASE,
        *("--engine", "hf", "--model", "checkpoint", "--model-path", "/data/m"),
        *("--pd", "pd=d1,d2", "--prfaas", "prfaas=p1,p2", "--policy", "paper"),
        *("--gateway-port", 9000, "--node-port", 9100, "--kvd-http-port", 9200),
        *("--kvd-port", 9300),
    ),
    # From nothing but a model of the catalog and hosts.
    "asked": (
        *("--engine", "emulated", "--model", "kimi-linear-48b-a3b", "--gbps", 100, "--rtt-ms", 20),
        *("--accelerator", "pd=h20", "--accelerator", "far=h200", "--gpus", 8),
        *("--pd", "pd=10.0.0.1,10.0.0.2", "--prfaas", "far=10.1.0.1"),
    ),
}


def goldens() -> Iterator[Golden]:
    with workplace():
        make_checkpoint(Path("checkpoint"))
        for name, words in RUNS.items():
            yield Golden(f"{name}.txt", prfaas("init", name, *words).text)
            yield Golden(f"{name}.files.json", described(Path(name)))
            yield Golden(f"{name}.json", prfaas("init", f"{name}-2", *words, "--json").data)
        yield Golden("add_host.txt", prfaas("init", "emulated", "--add-host", "pd=d3").text)
        yield Golden("add_host.files.json", described(Path("emulated")))
        yield Golden("renew.txt", prfaas("init", "emulated", "--renew").text)
