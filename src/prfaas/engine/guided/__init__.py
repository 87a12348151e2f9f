"""Guided decoding: answers that follow a JSON schema, an expression or a grammar.

    GrammarDescription ──► GrammarCompiler ──► CompiledGrammar ──► one matcher per sequence

A description is plain data. `host` alone imports llguidance, which is part of the `engine` extra,
in processes of its own: what a stranger's grammar does there ends with them.
"""

from prfaas.engine.guided.description import GrammarDescription

__all__ = ["GrammarDescription"]
