"""Answers with a structure: fields of requests that describe a grammar, and tool calls."""
