"""Whether the drawn cases find what they are for: `python -m tests.promises.mutants [NAME ...]`.

Each mutant is the product with one error put into it. The drawn cases run against a copy of the
sources with the error: first as few as `make test` draws, and where these do not find it, as many
as `make promises` draws. The command fails where a mutant is not found, and where the text that a
mutant replaces is not in the sources any more.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = {
    "simulated": "tests/promises/test_drawn_cases.py",
    "live": "tests/promises/test_drawn_cases_live.py",
}


class Mutant(NamedTuple):
    what: str
    file: str  # below src/prfaas
    old: str
    new: str
    found_by: Literal["simulated", "live"]


MUTANTS = {
    "alone": Mutant(
        "no node serves a request alone",
        "scheduler/options.py",
        "    ranks = view.local.ranks(view.cached)\n    free, load = ",
        "    return None\n    ranks = view.local.ranks(view.cached)\n    free, load = ",
        "simulated",
    ),
    "polls": Mutant(
        "the board learns from polls alone that a prefill has ended",
        "scheduler/board.py",
        "        node.set_work(now_s if free_at is None else free_at, -1)\n",
        "        node.set_work(node.view.free_at_s, -1)\n",
        "simulated",
    ),
    "drain": Mutant(
        "the gateway forgets that a cluster is drained",
        "gateway/fleet/fleet.py",
        "        and member.cluster not in fleet.drained\n",
        "",
        "live",
    ),
    "returned": Mutant(
        "a node that returns is never used again",
        "scheduler/view.py",
        "            self._drop(number)\n            self._rank(after, number)\n",
        "            self._drop(number)\n"
        "            if before.usable:\n"
        "                self._rank(after, number)\n",
        "simulated",
    ),
    "slot": Mutant(
        "the decode slot of a lost attempt stays booked",
        "scheduler/board.py",
        "        self.record_prefilled(job, now_s)\n"
        "        self._nodes[route.decode].reserve(-1, -job.kv_bytes)\n",
        "        self.record_prefilled(job, now_s)\n",
        "simulated",
    ),
    "pace": Mutant(
        "nobody learns that a node is slower than its like",
        "scheduler/board.py",
        "        node.put(node.view._replace(pace=pace))\n",
        "        node.put(node.view._replace(pace=1.0))\n",
        "simulated",
    ),
    "cut": Mutant(
        "a transfer that has failed counts as committed",
        "gateway/client/kvd_client.py",
        '            if status.state == "committed":\n                return status\n',
        '            if status.state != "granted":\n                return status\n',
        "live",
    ),
}


class Verdict(NamedTuple):
    within: str  # how many cases were drawn; empty: it was not found
    rule: str  # that it broke
    seconds: float


def judge(mutant: Mutant, seed: int) -> Verdict:
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prfaas-mutant-") as folder:
        sources = Path(folder) / "src"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", sources, ignore=ignored)
        put_into(mutant, sources)
        for cases, live in ((200, 5), (2000, 100)):
            rule = _broken_rule(mutant, sources, seed, cases, live)
            if rule:
                count = cases if mutant.found_by == "simulated" else live
                return Verdict(f"{count} {mutant.found_by}", rule, time.monotonic() - began_s)
    return Verdict("", "", time.monotonic() - began_s)


def put_into(mutant: Mutant, sources: Path) -> None:
    path = sources / "prfaas" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        sys.exit(f"{mutant.file} has {text.count(mutant.old)} times:\n{mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new))


def _broken_rule(mutant: Mutant, sources: Path, seed: int, cases: int, live: int) -> str:
    """The first rule that a case breaks, or the test that fails; empty: all hold."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n0"),
            *("--seed", str(seed), "--cases", str(cases), "--live", str(live), "--as-drawn"),
            TESTS[mutant.found_by],
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{sources}:{ROOT}:{ROOT / 'bench'}"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return ""
    if done.returncode != 1:
        sys.exit(f"pytest ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    failed = re.search(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE)
    rule = re.search(r"^E?\s*(?:AssertionError: )?([a-z]+_[a-z_]+: .*)$", done.stdout, re.M)
    name = failed[1] if failed else "?"
    return f"{name}: {rule[1]}" if rule else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=list(MUTANTS), help="Only these.")
    parser.add_argument("--seed", type=int, default=1, help="What the cases are drawn with.")
    asked = parser.parse_args()
    missed = []
    for name in asked.names or MUTANTS:
        verdict = judge(MUTANTS[name], asked.seed)
        within = f"found within {verdict.within} cases" if verdict.within else "NOT FOUND"
        sys.stdout.write(
            f"{name}: {MUTANTS[name].what}: {within}, {verdict.seconds:.0f} s\n    {verdict.rule}\n"
        )
        sys.stdout.flush()
        if not verdict.within:
            missed.append(name)
    if missed:
        sys.exit(f"not found: {', '.join(missed)}")


if __name__ == "__main__":
    main()
