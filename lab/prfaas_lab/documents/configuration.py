"""docs/configuration.md, generated from the schema: every section and key with its type, default
and meaning. Pure.

The meaning of a key is the string below its field in the source of the struct. Python keeps no such
string at run time, so it is read from the source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from prfaas.config.advice import AdviceQuestion
from prfaas.config.deployment import Deployment
from prfaas.config.host import HostConfig

_HEAD = """\
# Configuration

This page is generated from `src/prfaas/config` by `make docs`; a test fails when it is stale.

Two files configure a deployment, and a third asks for one. All are TOML. Unknown keys are errors,
and each error names the file, the key and the fix. Units are in the names of the keys: `_s` is
seconds, `_mb` is 10^6 bytes, `_tokens` is tokens. Paths are relative to the file.

- The **deployment file** describes model, workload, clusters and links. `prfaas plan`, `simulate`,
  `up` and `gateway` read it.
- The **host file** configures the processes of one host: `prfaas kvd --config FILE` reads `[kvd]`,
  `prfaas node --config FILE` reads `[node]`. It is optional.
- The **question file** is for `prfaas advise`: model, traffic, money, and what is owned.

A flag wins over the file. `--set KEY=VALUE` of `kvd`, `node` and `gateway` sets any key of this
page without a file, for example `prfaas kvd --set kvd.timeouts.grant_s=90`.
"""


class Key(NamedTuple):
    name: str
    kind: str
    default: str
    meaning: str


class Section(NamedTuple):
    title: str
    meaning: str
    keys: list[Key]


def reference() -> str:
    parts = [_HEAD, "## Deployment file\n"]
    parts += [_markdown(section) for section in sections(Deployment)]
    parts += ["## Host file\n"]
    parts += [_markdown(section) for section in sections(HostConfig)]
    parts += ["## Question file\n"]
    parts += ["`[model]`, `[workload]` and `[slo]` are those of the deployment file.\n"]
    known = {section.title for section in sections(Deployment)} - {"Top level", "`[[links]]`"}
    asked = sections(AdviceQuestion)
    parts += [_markdown(section) for section in asked if section.title not in known]
    return "\n".join(parts)


def sections(kind: type[msgspec.Struct], path: str = "", title: str = "") -> Iterator[Section]:
    """The struct's keys, then the sections below it, depth first."""
    hints = typing.get_type_hints(kind, include_extras=True)
    meanings = field_docstrings(kind)
    keys: list[Key] = []
    below: list[tuple[str, str, type[msgspec.Struct]]] = []
    tag = kind.__struct_config__.tag
    if tag is not None:
        keys.append(Key("kind", f'"{tag}"', "required", "Kind of the workload."))
    for field in msgspec.structs.fields(kind):
        name, hint = field.encode_name, hints[field.name]
        at = f"{path}.{name}" if path else name
        inner = _structs(hint)
        many = any(part is list for part in _origins(hint))
        named = any(part is dict for part in _origins(hint))
        at = f"{at}.NAME" if named else at
        for struct in inner:
            heading = f"`[[{at}]]`" if many else f"`[{at}]`"
            if len(inner) > 1:
                heading += f' with `kind = "{struct.__struct_config__.tag}"`'
            below.append((at, heading, struct))
        if not inner or many and field.name in meanings:
            meaning = meanings.get(field.name, "")
            keys.append(Key(name, _kind(hint), _default(field), meaning))
    if keys:
        yield Section(title or "Top level", inspect.cleandoc(kind.__doc__ or ""), keys)
    for at, heading, struct in below:
        yield from sections(struct, at, heading)


def field_docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field of the struct, by field name, on one line."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            found[field.target.id] = " ".join(after.value.value.split())
    return found


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives or elements of a type."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return (typing.get_args(hint)[0],)
    containers = (list, dict, types.UnionType, typing.Union)
    return typing.get_args(hint) if origin in containers else ()


def _structs(hint: Any) -> list[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [struct for part in _parts(hint) for struct in _structs(part)]


def _origins(hint: Any) -> Iterator[Any]:
    yield typing.get_origin(hint)
    for part in _parts(hint):
        yield from _origins(part)


def _kind(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(arguments[0]) + _bounds(arguments[1:])
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(part) for part in arguments if part is not type(None))
    if origin is dict:
        return f"{_kind(arguments[1])} by name"
    if origin is list:
        return "tables" if _structs(hint) else _list_kind(arguments[0])
    return {str: "string", int: "integer", float: "number", bool: "boolean"}[hint]


def _list_kind(element: Any) -> str:
    """The plural has its bounds after it: list of integers >= 1."""
    if typing.get_origin(element) is typing.Annotated:
        bare, *metas = typing.get_args(element)
        return f"list of {_kind(bare)}s{_bounds(tuple(metas))}"
    return f"list of {_kind(element)}s"


def _bounds(metas: tuple[Any, ...]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        for name, sign in signs.items()
        if isinstance(meta, msgspec.Meta) and getattr(meta, name) is not None
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "empty"
    if field.default is msgspec.NODEFAULT:
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return msgspec.json.encode(field.default).decode()


def _markdown(section: Section) -> str:
    lines = [f"### {section.title}", "", section.meaning.replace("\n", " "), ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in section.keys:
        lines.append(f"| `{key.name}` | {key.kind} | {key.default} | {key.meaning} |")
    return "\n".join([*lines, ""])
