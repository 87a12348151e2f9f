"""Measures any OpenAI server from outside: open-loop load, and a profile over HTTP."""
