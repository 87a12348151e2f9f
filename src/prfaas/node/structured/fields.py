"""The fields `response_format` and `structured_outputs`, as in vLLM, and the grammar that they
describe. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from prfaas.engine.guided import GrammarDescription
from prfaas.errors import InputError

MAX_CHOICES_LISTED = 10_000
ANY_OBJECT = '{"type": "object"}'


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None  # for people
    strict: bool | None = None  # as in vLLM, every answer follows the schema


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `StructuredOutputsParams`, without `structural_tag` and
    `disable_additional_properties`."""

    json: dict[str, Any] | str | None = None  # a schema, or its JSON
    regex: str | None = None
    choice: (
        Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES_LISTED)] | None
    ) = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


def describe_grammar(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> GrammarDescription | None:
    """None when the request leaves the answer free. InputError names the field."""
    described = _of_response_format(response_format)
    if structured_outputs is None:
        return described
    if described is not None:
        raise InputError(
            "response_format has a grammar already",
            where="structured_outputs",
            fix="send one of the two",
        )
    return _of_structured_outputs(structured_outputs)


def _of_response_format(given: ResponseFormat | None) -> GrammarDescription | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return GrammarDescription("json", ANY_OBJECT, "response_format")
    where = "response_format.json_schema"
    if given.json_schema is None:
        raise InputError("the field is missing", where=where, fix="send a name and a schema")
    return GrammarDescription(
        "json", _schema(given.json_schema.schema, f"{where}.schema"), f"{where}.schema"
    )


def _of_structured_outputs(given: StructuredOutputs) -> GrammarDescription:
    where = "structured_outputs"
    constraints = {
        "json": given.json,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object,
    }
    used = [name for name, value in constraints.items() if value is not None]
    if len(used) != 1:
        raise InputError(
            f"{len(used)} constraints instead of one",
            where=where,
            fix=f"send one of {', '.join(constraints)}",
        )
    (name,) = used
    at = f"{where}.{name}"
    whitespace = (not given.disable_any_whitespace, given.whitespace_pattern)
    if given.json is not None:
        return GrammarDescription("json", _schema(given.json, at), at, *whitespace)
    if given.regex is not None:
        return GrammarDescription("regex", given.regex, at)
    if given.choice is not None:
        return GrammarDescription("choice", msgspec.json.encode(given.choice).decode(), at)
    if given.grammar is not None:
        return GrammarDescription("grammar", given.grammar, at)
    if not given.json_object:
        raise InputError("false", where=at, fix="send true, or leave structured_outputs out")
    return GrammarDescription("json", ANY_OBJECT, at, *whitespace)


def _schema(given: dict[str, Any] | str | None, where: str) -> str:
    """The JSON text of a schema."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"the schema is not a JSON object: {error}", where=where) from None
        except RecursionError:
            raise InputError("the schema is nested too deeply", where=where) from None
    if given is None:
        raise InputError("the schema is missing", where=where, fix="send a JSON schema")
    return msgspec.json.encode(given).decode()
