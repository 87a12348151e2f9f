"""Guided decoding: answers that follow a JSON schema, an expression or a grammar.

    GrammarDescription ──► GrammarCompiler ──► CompiledGrammar ──► one matcher per sequence

A description is plain data. `compiler` alone imports llguidance, which is part of the `engine`
extra, so that other processes can describe and refuse grammars without it.
"""

from prfaas.engine.guided.description import GrammarDescription

__all__ = ["GrammarDescription"]
