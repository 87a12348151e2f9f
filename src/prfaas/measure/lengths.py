"""Parses distributions of prompt lengths from one command-line argument. Pure.

fixed:1000
lognormal:9.9,1.0,128,131072        mu, sigma, shortest, longest
0.7*fixed:512+0.3*fixed:30000       a mixture, with shares
"""

from __future__ import annotations

from prfaas.errors import InputError
from prfaas.planner.workload import Part, TraceRequest, Workload, empirical, lognormal, mixture

_FIX = "write fixed:TOKENS, lognormal:MU,SIGMA,MIN,MAX, or SHARE*...+SHARE*..."


def parse_lengths(text: str, *, output_tokens: float, where: str) -> Workload:
    try:
        parts = [_part(word.strip(), output_tokens) for word in text.split("+")]
    except ValueError:
        raise InputError(f"{text!r}", where=where, fix=_FIX) from None
    except InputError as error:
        raise InputError(error.problem, where=where, fix=error.fix) from None
    return parts[0].workload if len(parts) == 1 else mixture(parts, output_tokens=output_tokens)


def _part(word: str, output_tokens: float) -> Part:
    share, star, rest = word.partition("*")
    if star:
        weight = float(share)
        if not weight > 0:
            raise ValueError(word)
        return Part(weight, _workload(rest.strip(), output_tokens))
    return Part(1.0, _workload(word, output_tokens))


def _workload(word: str, output_tokens: float) -> Workload:
    kind, _, numbers = word.partition(":")
    match kind, numbers.split(","):
        case "fixed", [tokens] if int(tokens) > 0:
            one = TraceRequest(int(tokens), 0, round(output_tokens))
            return empirical([one], output_tokens=output_tokens)
        case "lognormal", [mu, sigma, shortest, longest] if float(sigma) > 0 and 0 < int(
            shortest
        ) <= int(longest):
            return lognormal(
                float(mu), float(sigma), int(shortest), int(longest), output_tokens=output_tokens
            )
    raise ValueError(word)
