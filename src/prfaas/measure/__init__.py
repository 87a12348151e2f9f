"""Measurements from outside: load on an OpenAI server, its profile over HTTP, a check of a path."""
