"""The keys of every configuration file: types, limits and defaults."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from prfaas.catalog.load import CatalogFile
from prfaas.config.advice import AdviceQuestion
from prfaas.config.deployment import Deployment
from prfaas.config.host import HostConfig
from prfaas.config.trace import TraceRow
from tests.goldens.canonical import Golden
from tests.goldens.schemas import described, structs_in

FILES: dict[str, type[msgspec.Struct]] = {
    "deployment": Deployment,
    "host": HostConfig,
    "question": AdviceQuestion,
    "catalog": CatalogFile,
    "trace": TraceRow,
}


def goldens() -> Iterator[Golden]:
    for name, kind in FILES.items():
        yield Golden(
            f"{name}.json", {section.__name__: described(section) for section in structs_in(kind)}
        )
