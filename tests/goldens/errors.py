"""What commands say about input that they refuse: one line, and the exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.goldens.canonical import Golden
from tests.goldens.commands import prfaas, workplace

CASE = "configs/case_study.toml"
TWO = "configs/two_by_two.toml"
REFUSED: tuple[tuple[object, ...], ...] = (
    ("plan", "missing.toml"),
    ("plan", "damaged.toml"),
    ("plan", "unknown_key.toml"),
    ("plan", "wrong_type.toml"),
    ("plan", "unknown_model.toml"),
    ("plan", "no_link.toml"),
    ("plan", CASE, "--load", 2),
    ("plan", CASE, "--reading", "exact", "--load", -1),
    ("plan", CASE, "--sweep", "links.7.gbps=1,2"),
    ("plan", CASE, "--sweep", "links.0.gbps"),
    ("plan", TWO, "--map"),
    ("plan", TWO, "--sweep", "links.0.gbps=1,2"),
    ("plan", CASE, "--unknown"),
    ("simulate", CASE, "--requests", 1),
    ("simulate", CASE, "--load", 0),
    ("simulate", CASE, "--speedup", 2),
    ("simulate", CASE, "--trace", "missing.jsonl"),
    ("simulate", CASE, "--trace", "damaged.jsonl"),
    ("simulate", TWO, "--trace", "damaged.jsonl"),
    ("simulate", TWO, "--baseline", "naive"),
    ("simulate", CASE, "--link-trace", "links.csv"),
    ("advise", "--model", "kimi-linear-48b-a3b"),
    ("advise", "--model", "kimi-linear-48b-a3b", "--link", 10),
    ("advise", "--model", "nothing", "--budget", 10, "--link", 10, "--prompt-tokens", 8000),
    ("advise", "configs/advise/hybrid.toml", "--here", "nothing"),
    ("kv", "nothing"),
    ("kv", "--lengths", "32K"),
    ("kv", "--gpus", 0),
    ("kv", "--accelerator", "nothing"),
    ("kv", "--config", "damaged.toml"),
    ("profile", "--estimate", "nothing", "--accelerator", "h200"),
    ("profile",),
    ("model", "make", "m", "--seed", -1),
    ("init", "d"),
    ("init", "d", "--plan", CASE, "--engine", "emulated", "--pd", "pd=h"),
    ("init", "d", "--add-host", "pd=h"),
    ("render", "kubernetes", CASE, "--out", "k"),
    ("render", "kubernetes", CASE, "--out", "k", "--engine", "emulated"),
    ("gateway", "unknown_key.toml"),
    ("kvd", "--config", "unknown_key.toml"),
    ("kvd", "--set", "kvd.nothing=1"),
    ("node", "--set", "node.port=many"),
    ("drain", "--gateway", "nowhere"),
    ("trace", "--latest", "--slowest"),
    ("trace", "--gateway", "ftp://x"),
    ("doctor", "nowhere"),
    ("doctor", "pair", "h"),
    ("wan",),
    ("probe", "nowhere"),
    ("bench", "nothing"),
    ("nothing",),
)
FILES = {
    "damaged.toml": "[model\n",
    "damaged.jsonl": '{"timestamp": 0, "input_length": 1}\n',
    "links.csv": "10,0,prfaas,nowhere\n",
}


def goldens() -> Iterator[Golden]:
    with workplace():
        for name, text in FILES.items():
            Path(name).write_text(text, encoding="utf-8")
        case = Path(CASE).read_text(encoding="utf-8")
        changes = {
            "unknown_key.toml": case.replace("[slo]", "[slo]\nunknown = 1"),
            "wrong_type.toml": case.replace("[slo]", '[slo]\nttft_s = "soon"'),
            "unknown_model.toml": case.replace('name = "case-study-1t"', 'name = "nothing"'),
            "no_link.toml": case.split("[[links]]")[0],
        }
        for name, text in changes.items():
            assert text != case
            Path(name).write_text(text, encoding="utf-8")
        said = []
        for words in REFUSED:
            found = prfaas(*words)
            assert found.code, f"{words} is not refused"
            said.append(f"$ prfaas {' '.join(map(str, words))}\n{found.failure}")
        yield Golden("refused.txt", "\n".join(said))
