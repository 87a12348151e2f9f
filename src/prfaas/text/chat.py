"""The fields of a chat request that determine its prompt. Names and defaults are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class Chat(msgspec.Struct, frozen=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template has already added them
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The template's variables besides the conversation."""
        effort, asked = self.reasoning_effort, self.chat_template_kwargs or {}
        if effort is None:
            return asked
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"} | asked
