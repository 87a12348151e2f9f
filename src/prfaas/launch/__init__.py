"""A whole deployment on one machine: which processes, started, watched and ended."""
