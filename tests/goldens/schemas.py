"""Describes msgspec types, and builds an example of each from its type alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

# An example for each pattern that a field may have.
_MATCHING = {
    "^[a-z0-9_]+$": "full0",
    "^[0-9a-f]{16,32}$": "0123456789abcdef",
    "^[0-9a-f]{32}$": "0123456789abcdef" * 2,
    "^[0-9a-f]{64}$": "0123456789abcdef" * 4,
}
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "multiple of"}
_LENGTHS = {"min_length": "least", "max_length": "most", "pattern": "pattern"}


def described(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """How the struct is encoded, and its fields by name: type and default."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    found: dict[str, Any] = {
        "fields": {f.encode_name: f"{type_text(f.type)}; {_default(f)}" for f in info.fields}
    }
    if info.tag is not None:
        found["tag"] = f"{info.tag_field}={info.tag!r}"
    if info.array_like:
        found["array"] = [f.encode_name for f in info.fields]
    if info.forbid_unknown_fields:
        found["refuses_unknown_fields"] = True
    if kind.__struct_config__.omit_defaults:
        found["omits_defaults"] = True
    return found


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type contains, itself included, each once."""
    known: set[type] = set()

    def walk(info: Any) -> Iterator[type[msgspec.Struct]]:
        if isinstance(info, inspect.StructType):
            if info.cls in known:
                return
            known.add(info.cls)
            yield info.cls
            for field in info.fields:
                yield from walk(field.type)
            return
        for name in ("item_type", "item_types", "key_type", "value_type", "types"):
            inner = getattr(info, name, None)
            for one in inner if isinstance(inner, tuple) else [inner]:
                if isinstance(one, inspect.Type):
                    yield from walk(one)

    yield from walk(inspect.type_info(kind))


def type_text(info: Any) -> str:
    """The type in one line, such as `int >= 0 | none`."""
    match info:
        case inspect.UnionType():
            return " | ".join(sorted(type_text(one) for one in info.types))
        case inspect.StructType():
            return info.cls.__name__
        case inspect.LiteralType():
            return f"one of {', '.join(sorted(map(repr, info.values)))}"
        case inspect.TupleType():
            return f"[{', '.join(type_text(one) for one in info.item_types)}]"
        case inspect.DictType():
            inner = f"{type_text(info.key_type)}: {type_text(info.value_type)}"
            return f"{{{inner}}}{_limits(info)}"
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            return f"list of ({type_text(info.item_type)}){_limits(info)}"
        case inspect.EnumType():
            return f"one of {', '.join(sorted(repr(one.value) for one in info.cls))}"
        case inspect.Metadata():
            return type_text(info.type)
    return f"{type(info).__name__.removesuffix('Type').lower()}{_limits(info)}"


def _limits(info: Any) -> str:
    words = []
    for name, sign in (_LIMITS | _LENGTHS).items():
        value = getattr(info, name, None)
        if value is not None:
            words.append(f" {sign} {value}")
    return "".join(words)


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"default {msgspec.to_builtins(field.default_factory())!r}"
    if isinstance(field.default, msgspec.Struct) and field.default == type(field.default)():
        return "default: its defaults"
    if field.default in (msgspec.UNSET, msgspec.NODEFAULT):
        return "left out"
    return f"default {msgspec.to_builtins(field.default, builtin_types=(bytes,))!r}"


# Examples ----------------------------------------------------------------------------------------


def example(kind: Any, *, only_required: bool = False) -> Any:
    """A value of the type: every field is set, or only those without a default."""
    return _example(inspect.type_info(kind), "value", only_required)


def _example(info: Any, name: str, only_required: bool) -> Any:
    match info:
        case inspect.StructType():
            fields = [f for f in info.fields if f.required or not only_required]
            values = {f.name: _example(f.type, f.encode_name, only_required) for f in fields}
            return info.cls(**values)
        case inspect.UnionType():
            return _example(_first(info), name, only_required)
        case inspect.LiteralType():
            return sorted(info.values, key=repr)[-1]
        case inspect.TupleType():
            return tuple(_example(one, name, only_required) for one in info.item_types)
        case inspect.VarTupleType():
            return tuple(_items(info, name, only_required))
        case inspect.ListType():
            return list(_items(info, name, only_required))
        case inspect.SetType():
            return set(_items(info, name, only_required))
        case inspect.DictType():
            key = _example(info.key_type, f"a_{name}", only_required)
            return {key: _example(info.value_type, name, only_required)}
        case inspect.StrType():
            return _text(info, name)
        case inspect.BytesType():
            return bytes(range(1, 5))
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return int(_number(info, 7))
        case inspect.FloatType():
            return _number(info, 0.5)
        case inspect.NoneType():
            return None
        case inspect.RawType():
            return msgspec.Raw(b'{"raw":1}')
        case inspect.AnyType():
            return {"any": 1}
        case inspect.Metadata():
            return _example(info.type, name, only_required)
    raise TypeError(f"no example of {info}; add one here")


def _first(info: inspect.UnionType) -> Any:
    """The alternative that says most: a struct before a list before plain values before nothing."""
    order = (inspect.StructType, inspect.ListType, inspect.VarTupleType, inspect.DictType)

    def place(one: Any) -> tuple[int, str]:
        for number, kind in enumerate(order):
            if isinstance(one, kind):
                return number, type_text(one)
        return len(order) + isinstance(one, inspect.NoneType), type_text(one)

    return min(info.types, key=place)


def _items(info: Any, name: str, only_required: bool) -> list[Any]:
    most = 2 if info.max_length is None else min(2, info.max_length)
    count = max(most, info.min_length or 0)
    return [_example(info.item_type, name, only_required) for _ in range(count)]


def _text(info: inspect.StrType, name: str) -> str:
    if info.pattern is not None:
        return _MATCHING[info.pattern]
    text = f"some {name}"
    if info.min_length is not None and len(text) < info.min_length:
        text = text.ljust(info.min_length, "x")
    return text if info.max_length is None else text[: info.max_length]


def _number(info: Any, wanted: float) -> float:
    low = info.ge if info.ge is not None else info.gt
    high = info.le if info.le is not None else info.lt
    value = wanted
    if low is not None and value <= low:
        value = low + 1
    if high is not None and value > high:
        value = high if info.le is not None else high / 2
    return value
