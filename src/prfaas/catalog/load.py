"""The catalog: built-in models, accelerators and profiles, plus users' entries in TOML."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec

from prfaas.catalog.hardware import Accelerator, ProfileRecord
from prfaas.catalog.models import Model
from prfaas.config.strict import decode, parse_toml, read_text
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec

Entry = TypeVar("Entry", Model, Accelerator)


class CatalogFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One TOML file; every table is optional."""

    models: list[Model] = []
    accelerators: list[Accelerator] = []
    profiles: list[ProfileRecord] = []


@dataclass(frozen=True, slots=True)
class Catalog:
    models: Mapping[str, Model]
    accelerators: Mapping[str, Accelerator]
    profiles: tuple[ProfileRecord, ...]

    @classmethod
    def builtin(cls) -> Catalog:
        catalog = cls({}, {}, ())
        data = resources.files("prfaas.catalog") / "data"
        for name in ("models.toml", "accelerators.toml", "profiles.toml"):
            catalog = catalog._with(parse_catalog((data / name).read_text(encoding="utf-8"), name))
        return catalog

    def extended(self, paths: Iterable[str | Path]) -> Catalog:
        """Adds the users' files. An entry with a known name replaces the built-in one."""
        catalog = self
        for path in paths:
            catalog = catalog._with(parse_catalog(read_text(path), path))
        return catalog

    def model(self, name: str) -> Model:
        return _find(self.models, name, "model", "describe it in a catalog file as [[models]]")

    def accelerator(self, name: str) -> Accelerator:
        advice = "describe it in a catalog file as [[accelerators]]"
        return _find(self.accelerators, name, "accelerator", advice)

    def profile(self, model: str, accelerator: str, gpus: int) -> ProfileRecord | None:
        """The profile of one instance of exactly this size. Profiles are not scaled."""
        for record in self.profiles:
            if (record.model, record.accelerator, record.gpus) == (model, accelerator, gpus):
                return record
        return None

    def profiles_of(self, model: str) -> list[ProfileRecord]:
        return [record for record in self.profiles if record.model == model]

    def prefill_seconds(self, record: ProfileRecord) -> list[float]:
        """The time of each of the record's prefill points, in their order."""
        implied = any(point.phi_gbps is not None for point in record.prefill)
        published = self.model(record.model).spec() if implied else KVSpec(())
        return [point.seconds_for(published) for point in record.prefill]

    def _with(self, file: CatalogFile) -> Catalog:
        def key(record: ProfileRecord) -> tuple[str, str, int]:
            return (record.model, record.accelerator, record.gpus)

        profiles = {key(record): record for record in (*self.profiles, *file.profiles)}
        return Catalog(
            models={**self.models, **{m.name: m for m in file.models}},
            accelerators={**self.accelerators, **{a.name: a for a in file.accelerators}},
            profiles=tuple(profiles.values()),
        )


def parse_catalog(text: str, file: str | Path) -> CatalogFile:
    parsed = decode(parse_toml(text, file), CatalogFile, file)
    try:
        for model in parsed.models:
            model.spec()  # raises here when a geometry of this file is invalid
    except InputError as error:
        raise error.in_file(file) from None
    return parsed


def _find(entries: Mapping[str, Entry], name: str, what: str, advice: str) -> Entry:
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(entries)}; or {advice}"
    raise InputError(f"unknown {what} {name!r}", fix=fix)
