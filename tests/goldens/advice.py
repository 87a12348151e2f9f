"""`prfaas advise` for every question in `configs/advise`, and a deployment that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.goldens.canonical import Golden, Precision
from tests.goldens.commands import prfaas, workplace

# As of plans.
PRECISION = Precision(digits=7, absolute=1e-9)


def goldens() -> Iterator[Golden]:
    with workplace() as place:
        for file in sorted((place / "configs" / "advise").glob("*.toml")):
            words = ("advise", f"configs/advise/{file.name}")
            yield Golden(f"{file.stem}.json", prfaas(*words, "--json").data)
            yield Golden(f"{file.stem}.txt", prfaas(*words).text)
        richer = ("advise", "configs/advise/hybrid.toml", "--budget", 200, "--write", "found.toml")
        yield Golden("hybrid_with_200_usd.txt", prfaas(*richer).text)
        yield Golden("hybrid_with_200_usd.toml.txt", Path("found.toml").read_text("utf-8"))
