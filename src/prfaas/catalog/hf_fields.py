"""Checked access to the fields of a parsed `config.json`.

Every mistake is an InputError that names the field. Does not interpret the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.errors import InputError

DESCRIBE_BY_HAND = "describe the model's groups in a [[models]] table of a catalog TOML"
COMPLETE = f"add the field, as the model's published config.json has it, or {DESCRIBE_BY_HAND}"
CORRECT = "take the value from the model's published config.json"

# Far above any model; keeps a typing error from becoming a list of 10^12 layers.
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Fields:
    """One object of a config. `path` is its place: empty, or `text_config.`"""

    values: Mapping[str, Any]
    path: str = ""

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def has(self, key: str) -> bool:
        """Whether the field has a value other than JSON's null."""
        return self.values.get(key) is not None

    def error(self, key: str, problem: str, fix: str = CORRECT) -> InputError:
        return InputError(problem, where=self.path + key, fix=fix)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be a whole number, not {shown(value)}")
        if value < least:
            raise self.error(key, f"must be at least {least}, not {value}")
        return value

    def layer_count(self) -> int:
        layers = self.count("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.error("num_hidden_layers", f"{layers} layers are more than any model has")
        return layers

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {shown(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        return [self._item(key, item, str, "strings") for item in self._list(key)]

    def numbers(self, key: str) -> list[int]:
        return [self._item(key, item, int, "whole numbers") for item in self._list(key)]

    def section(self, key: str) -> Fields:
        """The object under `key`, or an empty one."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {shown(value)}")
        return Fields(value, f"{self.path}{key}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The fields with defaults for missing ones. A null is a value and gets no default."""
        return Fields({**defaults, **self.values}, self.path)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing", COMPLETE)
        return value

    def _list(self, key: str) -> list[Any]:
        value = self._value(key, None)
        if not isinstance(value, list | tuple):
            raise self.error(key, f"must be a list, not {shown(value)}")
        return list(value)

    def _item(self, key: str, item: Any, kind: type, kinds: str) -> Any:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise self.error(key, f"must be a list of {kinds}, but has {shown(item)} in it")
        return item


def shown(value: Any) -> str:
    """A wrong value as an error message shows it, however long it is."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def listed(numbers: Iterable[int]) -> str:
    """The first few of `numbers`, for an error message."""
    some = [str(number) for number in sorted(numbers)]
    return ", ".join(some[:5]) + (", ..." if len(some) > 5 else "")
