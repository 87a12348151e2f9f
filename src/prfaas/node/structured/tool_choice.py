"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat: how its tool calls are read, and the
grammar of calls that must be made. Pure. Semantics are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from prfaas.engine.guided import GrammarDescription
from prfaas.errors import InputError
from prfaas.text.tool_calls import ToolForm, Wanted

MAX_TOOLS = 1024


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How an answer's tool calls are read."""

    form: ToolForm
    functions: Sequence[Mapping[str, Any]]
    choice: ToolChoice
    parallel: bool

    @property
    def is_forced(self) -> bool:
        return self.choice != "auto"

    @property
    def is_named(self) -> bool:
        return isinstance(self.choice, NamedTool)

    @property
    def is_strict(self) -> bool:
        """Whether a function's calls must follow its schema."""
        return any(function.get("strict") is True for function in self.functions)

    def grammar(self, special_token_id: Callable[[str], int | None]) -> GrammarDescription | None:
        """Of calls that must be made, or that must follow their schema. None: calls are free."""
        if not (self.is_forced or self.is_strict):
            return None
        if self.form.grammar is None:
            raise InputError(
                "in the form of this model's chat template, calls can neither be forced nor held "
                "to a schema",
                where="tool_choice" if self.is_forced else "tools",
                fix='send "auto"' if self.is_forced else "leave strict out",
            )
        functions, several = self.functions, self.parallel
        if isinstance(self.choice, NamedTool):
            name = self.choice.function.name
            functions = [one for one in functions if one["name"] == name][:1]
            several = False

        def mark(text: str) -> str:
            token = special_token_id(text)
            return json.dumps(text) if token is None else f"<[{token}]>"

        wanted = Wanted(functions, several=several, is_forced=self.is_forced)
        return GrammarDescription("lark", self.form.grammar(wanted, mark), "tools")


def plan_tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    find_form: Callable[[], ToolForm | None],
) -> ToolUse | None:
    """None when the answer's text is not looked at. InputError names the field."""
    if tools is not None and not 0 < len(tools) <= MAX_TOOLS:
        raise InputError(
            f"{len(tools)} tools", where="tools", fix=f"send 1 to {MAX_TOOLS}, or leave it out"
        )
    if choice == "none" or (tools is None and choice is None):
        return None
    if tools is None:
        raise InputError("there are no tools", where="tool_choice", fix="send tools")
    form = find_form()
    if form is None:
        raise InputError(
            "this model's chat template does not show a known form of tool calls",
            where="tools",
            fix='leave it out, or send tool_choice "none"',
        )
    functions = [_function(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    if isinstance(choice, NamedTool):
        names = [function["name"] for function in functions]
        if choice.function.name not in names:
            raise InputError(
                f"{choice.function.name[:100]!r} is not one of the tools",
                where="tool_choice.function.name",
                fix="name a function of the tools",
            )
    return ToolUse(form, functions, choice or "auto", parallel is not False)


def _function(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(
            "the tool has no function with a name", where=where, fix="describe the function"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InputError(
            "the parameters are not an object",
            where=f"{where}.function.parameters",
            fix="send a JSON schema",
        )
    return function
