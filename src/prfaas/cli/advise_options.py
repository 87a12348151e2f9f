"""The flags of `prfaas advise`, and how they change the question of a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from prfaas.advisor.traffic import mu_for_mean
from prfaas.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

# Where neither the file nor a flag says otherwise.
SPREAD, SHORTEST, LONGEST, OUTPUT_TOKENS = 1.0, 16, 131_072, 1024
TOKENS_PER_S = 40.0

_QUESTION = (
    click.option("--model", help="Model of the catalog, or path of its config.json."),
    click.option(
        "--weights",
        type=click.Choice(["bf16", "fp8", "int4", "fp4"]),
        help="Number format of the weights. The default is the model's own.",
    ),
    click.option(
        "--budget", type=float, metavar="USD", help="Most USD per hour, beside what is owned."
    ),
    click.option("--rate", type=float, metavar="RPS", help="Requests per second to be served."),
    click.option(
        "--own",
        multiple=True,
        metavar="GPU=N",
        help="GPUs that exist here, such as h20=32 or, with their cost per hour, h20=32@0.4.",
    ),
    click.option(
        "--own-there", multiple=True, metavar="GPU=N", help="GPUs that exist at the other site."
    ),
    click.option(
        "--here",
        metavar="GPU,...",
        help="GPUs that may be bought here, or none. The default is all with a price of which a "
        "time is known, so that estimates are not only what a data sheet allows.",
    ),
    click.option(
        "--there", metavar="GPU,...", help="GPUs that may be bought at the other site, or none."
    ),
    click.option(
        "--price", multiple=True, metavar="GPU=USD", help="Price per GPU and hour; repeatable."
    ),
    click.option(
        "--gpus-per-instance",
        metavar="N,...",
        help="Instance sizes. The default is the smallest that holds the model, twice and four "
        "times that.",
    ),
    click.option(
        "--link",
        multiple=True,
        metavar="GBPS[=USD/month|hour]",
        help="Bandwidth between the sites that may be chosen, such as 10, 10=2000/month or "
        "100=12.5/hour; repeatable.",
    ),
    click.option("--rtt-ms", type=float, help="Round trip between the sites. [default: 20]"),
)
_TRAFFIC = (
    click.option(
        "--prompt-tokens", type=float, metavar="N", help="Mean length of an uncached prompt."
    ),
    click.option("--median-prompt", type=float, metavar="N", help="Median, instead of the mean."),
    click.option(
        "--spread",
        type=float,
        help=f"Standard deviation of ln(length). [default: {SPREAD:g}, the paper's]",
    ),
    click.option(
        "--longest-prompt", type=int, metavar="N", help=f"Longest prompt. [default: {LONGEST:,}]"
    ),
    click.option(
        "--output-tokens",
        type=float,
        metavar="N",
        help=f"Mean response. [default: {OUTPUT_TOKENS:,}]",
    ),
    click.option("--cached-tokens", type=int, metavar="N", help="Cached prefix of each prompt."),
    click.option(
        "--tokens-per-s",
        type=float,
        help=f"Output tokens per second that each request gets. [default: {TOKENS_PER_S:g}]",
    ),
    click.option("--ttft", type=float, metavar="S", help="Longest time to first token."),
    click.option(
        "--ttft-quantile", type=float, help="Share of requests with that TTFT. [default: 0.9]"
    ),
    click.option(
        "--utilisation",
        type=float,
        help="Largest load of a stage. [default: 0.8, so that queues stay short]",
    ),
)


def question_options(command: F) -> F:
    for option in reversed((*_QUESTION, *_TRAFFIC)):
        command = option(command)
    return command


def apply_flags(raw: dict[str, Any], flags: dict[str, Any]) -> None:
    """Changes the question as the flags say. A flag wins over the file."""
    if flags["model"] is not None:
        raw["model"] = _model(flags["model"])
    if "model" not in raw:
        raise InputError(
            "no model is given",
            where="model",
            fix="add --model NAME (prfaas kv lists them) or the path of a config.json",
        )
    _set(raw, "model", "weights", flags["weights"])
    if flags["budget"] is not None or flags["rate"] is not None:
        raw.pop("budget_usd_per_hour", None)
        raw.pop("rate_rps", None)
    for key, flag in (("budget_usd_per_hour", "budget"), ("rate_rps", "rate")):
        if flags[flag] is not None:
            raw[key] = flags[flag]
    if flags["utilisation"] is not None:
        raw["utilisation"] = flags["utilisation"]
    _apply_hardware(raw, flags)
    _apply_links(raw, flags)
    _apply_traffic(raw, flags)


def _apply_hardware(raw: dict[str, Any], flags: dict[str, Any]) -> None:
    owned = [_owned(text, "here", "--own") for text in flags["own"]]
    owned += [_owned(text, "there", "--own-there") for text in flags["own_there"]]
    if owned:
        raw["owned"] = owned
    for key in ("here", "there"):
        if flags[key] is not None:
            names = [] if flags[key] == "none" else flags[key].split(",")
            _set(raw, "hardware", key, [name.strip() for name in names])
    for text in flags["price"]:
        name, usd = _pair(text, "--price", "h20=1.5")
        prices = raw.setdefault("hardware", {}).setdefault("prices", {})
        prices[name] = _number(usd, "--price", "h20=1.5")
    if flags["gpus_per_instance"] is not None:
        sizes = flags["gpus_per_instance"].split(",")
        try:
            _set(raw, "hardware", "gpus_per_instance", [int(size) for size in sizes])
        except ValueError:
            raise _not("--gpus-per-instance", flags["gpus_per_instance"], "4,8") from None


def _apply_links(raw: dict[str, Any], flags: dict[str, Any]) -> None:
    if flags["link"]:
        raw["links"] = [_link(text) for text in flags["link"]]
    if flags["rtt_ms"] is not None:
        for link in raw.get("links", []):
            link["rtt_ms"] = flags["rtt_ms"]
    if not raw.get("links"):
        raise InputError(
            "no link between the two sites is given",
            where="links",
            fix="add --link 10 (in Gbit/s), or several: --link 10=2000/month --link 100=9000/month",
        )


def _apply_traffic(raw: dict[str, Any], flags: dict[str, Any]) -> None:
    for key, flag in (
        ("output_tokens_per_s", "tokens_per_s"),
        ("ttft_s", "ttft"),
        ("ttft_quantile", "ttft_quantile"),
    ):
        _set(raw, "slo", key, flags[flag])
    raw.setdefault("slo", {}).setdefault("output_tokens_per_s", TOKENS_PER_S)
    mean, median = flags["prompt_tokens"], flags["median_prompt"]
    if mean is not None and median is not None:
        raise InputError(
            "the mean and the median are both given",
            where="--median-prompt",
            fix="remove --prompt-tokens or --median-prompt",
        )
    if mean is not None or median is not None:
        known = raw.get("workload", {})
        raw["workload"] = _workload(mean, median, flags, known.get("output_tokens", OUTPUT_TOKENS))
        return
    if "workload" not in raw:
        raise InputError(
            "the traffic is not described",
            where="workload",
            fix="add --prompt-tokens N, the mean length of an uncached prompt, or [workload]",
        )
    for key, flag in (
        ("sigma", "spread"),
        ("max_tokens", "longest_prompt"),
        ("output_tokens", "output_tokens"),
        ("cached_tokens", "cached_tokens"),
    ):
        _set(raw, "workload", key, flags[flag])


def _workload(
    mean: float | None, median: float | None, flags: dict[str, Any], output_tokens: float
) -> dict[str, Any]:
    sigma = SPREAD if flags["spread"] is None else flags["spread"]
    longest = flags["longest_prompt"] or LONGEST
    if not (math.isfinite(sigma) and sigma > 0):
        raise _not("--spread", sigma, "1.0")
    if median is not None and not median > 0:
        raise _not("--median-prompt", median, "8000")
    mu = (
        math.log(median) if median is not None else mu_for_mean(mean or 0, sigma, SHORTEST, longest)
    )
    return {
        "kind": "lognormal",
        "mu": mu,
        "sigma": sigma,
        "min_tokens": SHORTEST,
        "max_tokens": longest,
        "output_tokens": flags["output_tokens"] or output_tokens,
        "cached_tokens": flags["cached_tokens"] or 0,
    }


def _model(text: str) -> dict[str, Any]:
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        folder = path if path.is_dir() else path.absolute().parent
        return {"name": folder.name, "config": str(path.absolute())}
    return {"name": text}


def _owned(text: str, site: str, flag: str) -> dict[str, Any]:
    name, count = _pair(text, flag, "h20=32")
    gpus, at, usd = count.partition("@")
    if not gpus.strip().isdigit():
        raise _not(flag, text, "h20=32")
    owned: dict[str, Any] = {"accelerator": name, "gpus": int(gpus), "site": site}
    if at:
        owned["usd_per_gpu_hour"] = _number(usd, flag, "h20=32@0.4")
    return owned


def _link(text: str) -> dict[str, Any]:
    example = "10=2000/month"
    gbps, priced, price = text.partition("=")
    link: dict[str, Any] = {"gbps": _number(gbps, "--link", example)}
    if priced:
        usd, _, period = price.partition("/")
        if period not in ("month", "hour"):
            raise _not("--link", text, example)
        link[f"usd_per_{period}"] = _number(usd, "--link", example)
    return link


def _set(raw: dict[str, Any], section: str, key: str, value: Any) -> None:
    if value is not None:
        raw.setdefault(section, {})[key] = value


def _pair(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise _not(flag, text, example)
    return name.strip(), value


def _number(text: str, flag: str, example: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _not(flag, text, example) from None


def _not(flag: str, value: Any, example: str) -> InputError:
    return InputError(f"{value!r} is not understood", where=flag, fix=f"example: {example}")
