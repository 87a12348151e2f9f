"""How much work and memory a grammar may take."""

from __future__ import annotations

from llguidance import LLParserLimits

# A step of a hostile grammar takes up to 0.4 s with these, and 2.6 s with llguidance's own limits.
# A lexer's state takes about 1.5 kB, in each sequence.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=20_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
