"""Unlike engines hand the same prompts over to each other, both ways: are the tokens one engine's?

\b
    python -m prfaas_lab bench pairs --python .venv-vllm/bin/python [--models falcon-h1]
                                     [--pairs node:tp2] [--lengths 65,129] [--directions there]
                                     [--gateway] [--form canonical]

The engines are `prfaas node` (`node`: transformers) and vLLM servers on the CPU in float32:

\b
    tp1, tp2, tp4      1, 2 and 4 tensor-parallel ranks (the models have 2 KV heads)
    pp2, tp2pp2        2 pipeline stages, with 1 and 2 ranks each
    b64, b256, tp2b64  blocks of 64 and 256 tokens (vLLM's own choice is 128)
    cached, ds         vLLM's prefix cache; convolution histories with channels first

`--python` is the interpreter of an environment with vLLM and prfaas. The benchmark makes the
models. For each pair and direction it hands prompts of the given lengths over, over HTTP as
`prfaas doctor pair --try` does: at the last token but one, and where a gateway would. Then
conversations: a second turn goes the same way and sends only what is new; a third goes back, and
the engine that received the first two resumes from what crossed. With `--gateway` the same prompts
go through `prfaas gateway`, which offloads each of them. Prints JSON; for each pair and direction:

\b
    tokens_equal            hand-offs whose greedy tokens equal the receiver's own
    tokens_equal_node       hand-offs whose greedy tokens equal those of `prfaas node` alone
    logprob_difference      the largest, to the receiver's own (`prfaas node` reports none)
    bytes_equal             hand-offs that sent exactly the bytes of their form: `kv_bytes` of the
                            model's config in the canonical form, whole blocks in the native one
    prefill_s, exposed_s    median time of the prefill, and from its end to the commit
    turns, gateway          the same for conversations and for the gateway
    failures                what did not hold, with the length; the first few

At most the node and two vLLM servers run at once. Servers that several pairs need start once. A
server that does not start fails its own pairs. Exit code 1: a pair did not hold.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from _engine_rack import (
    GATEWAY_MODEL,
    NEW_TOKENS,
    NODE,
    POLL_S,
    REQUEST_S,
    SETTLE_S,
    Answer,
    Engine,
    Failed,
    Rack,
    base,
    gateway,
    generated,
    post,
    say,
)
from _vllm_options import (
    lengths_option,
    logs_option,
    models_option,
    parse_lengths,
    python_option,
)
from prfaas.catalog.hf_file import read_hf_config
from prfaas.clock import MonotonicClock
from prfaas.contracts.forms import choose_compat, compats_of
from prfaas.contracts.kvd_api import spec_of
from prfaas.display.console import print_json, run_benchmark
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, build_spec
from prfaas.scheduler.handoff import choose_handoff
from prfaas.studies.pair_check import EnginePair
from prfaas.studies.pair_verdict import whole_block_bytes
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, run_handoff
from prfaas.types import CANONICAL
from prfaas_lab.testing.vllm_configurations import (
    MAX_TOKENS,
    SERVED_MODELS,
    VLLM_CONFIGURATIONS,
    ServedModel,
    configuration_named,
)
from prfaas_lab.testing.vllm_server import MAX_LOGPROB_DIFFERENCE

# Around blocks of 32 to 256, a window, the convolution's columns, and chunks of 256.
LENGTHS = (
    *(2, 3, 4, 5, 33, 64, 65, 100, 101, 102, 127, 128, 129, 130),
    *(200, 256, 257, 385, 513, 900, 1300),
)
# A chain: each vLLM configuration starts once.
PAIRS = (
    *("node:tp1", "tp1:tp2", "node:tp2", "tp2:tp4", "node:tp4", "tp4:pp2"),
    *("node:pp2", "pp2:b64", "node:b64", "b64:b256", "node:b256"),
)
MOST_TOKENS = MAX_TOKENS - NEW_TOKENS  # of a prompt
TURNS = (385, 700, 1000)  # tokens of the prompts of one conversation
CONVERSATIONS = 2
MOST_FAILURES = 12  # that a direction's result lists
MOST_ERRORS_IN_A_ROW = 3


# What is handed over ------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """What was seen of one direction of a pair."""

    tried: int = 0
    tokens_equal: int = 0
    tokens_equal_node: int = 0
    bytes_equal: int = 0
    sent_bytes: int = 0
    logprob_difference: float | None = None
    prefill_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    answers: set[tuple[int, ...]] = field(default_factory=set)
    errors_in_a_row: int = 0

    @property
    def is_hopeless(self) -> bool:
        """Whether to leave the rest out: each attempt at a server that hangs takes minutes."""
        return self.errors_in_a_row >= MOST_ERRORS_IN_A_ROW

    def fail(self, what: str) -> None:
        self.failures.append(what[:500])

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """One hand-off's error is a result; the others go on."""
        try:
            yield
        except Exception as error:
            self.tried += 1
            self.errors_in_a_row += 1
            self.fail(f"{what}: {type(error).__name__}: {error}")
        else:
            self.errors_in_a_row = 0

    def judge_tokens(self, what: str, found: Answer, own: Answer, node: Answer) -> None:
        self.tried += 1
        self.answers.add(tuple(found.tokens))
        if found.tokens == own.tokens:
            self.tokens_equal += 1
        else:
            self.fail(
                f"{what}: tokens differ from the receiver's at {first_difference(found, own)}"
            )
        self.tokens_equal_node += found.tokens == node.tokens
        if found.logprobs and own.logprobs and found.tokens == own.tokens:
            self._judge_logprobs(what, found.logprobs, own.logprobs)

    def _judge_logprobs(
        self, what: str, found: Sequence[float | None], own: Sequence[float | None]
    ) -> None:
        pairs = zip(found, own, strict=True)
        by = [abs(a - b) if a is not None and b is not None else math.inf for a, b in pairs]
        if not all(one <= MAX_LOGPROB_DIFFERENCE for one in by):  # also a NaN
            self.fail(f"{what}: log-probabilities differ by {by}")
        known = [one for one in by if math.isfinite(one)]
        self.logprob_difference = max([*known, self.logprob_difference or 0.0])

    def judge_bytes(self, what: str, sent: int | None, expected: int) -> None:
        if sent == expected:
            self.bytes_equal += 1
        else:
            self.fail(f"{what}: {sent} bytes were sent instead of {expected}")
        self.sent_bytes += sent or 0

    def as_dict(self) -> dict[str, Any]:
        worst = self.logprob_difference
        return {
            "tried": self.tried,
            "tokens_equal": self.tokens_equal,
            "tokens_equal_node": self.tokens_equal_node,
            "logprob_difference": None if worst is None else float(f"{worst:.2e}"),
            "bytes_equal": self.bytes_equal,
            "sent_bytes": self.sent_bytes,
            "prefill_s": _median(self.prefill_s),
            "exposed_s": _median(self.exposed_s),
            "distinct_answers": len(self.answers),
            "failures": self.failures[:MOST_FAILURES],
            "failed": len(self.failures),
        }


def _median(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds), 4) if seconds else None


def first_difference(one: Answer, two: Answer) -> int:
    pairs = zip(one.tokens, two.tokens, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(one.tokens), len(two.tokens)) if same is None else same


@dataclass(frozen=True, slots=True)
class Wire:
    """How many bytes a hand-off of the model takes in a form."""

    form: str
    spec: KVSpec  # of the model's config in the canonical form, of the kvd's pool in the native one
    block_tokens: int

    def held_tokens(self, skip_tokens: Mapping[str, int]) -> int:
        """Tokens of full attention that a grant's receiver has."""
        full = [group.name for group in self.spec.groups if isinstance(group, FullAttention)]
        return min((skip_tokens.get(name, 0) for name in full), default=0)

    def nbytes(self, tokens: int, skip_tokens: Mapping[str, int]) -> int:
        held = self.held_tokens(skip_tokens)
        if self.form == CANONICAL:
            return self.spec.kv_bytes(tokens, held)
        return whole_block_bytes(self.spec, tokens, self.block_tokens, held)


class Answers:
    """The answers of single engines, each computed once: they outlive the engines."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, tuple[int, ...]], Answer] = {}

    def of(self, engine: Engine, prompt: list[int]) -> Answer:
        key = (base(engine.name), tuple(prompt))
        if key not in self._found:
            self._found[key] = engine.alone(prompt)
        return self._found[key]


@dataclass(frozen=True, slots=True)
class Plan:
    lengths: tuple[int, ...]
    conversations: int
    with_gateway: bool
    handoffs: str  # last, chosen, both


class Direction:
    """One engine hands over to another."""

    def __init__(
        self,
        source: Engine,
        target: Engine,
        node: Engine,
        served: ServedModel,
        wire: Wire,
        answers: Answers,
    ) -> None:
        self._source = source
        self._target = target
        self._node = node
        self._served = served
        self._wire = wire
        self._answers = answers

    def run(self, plan: Plan) -> dict[str, Any]:
        began_s = time.monotonic()
        found: dict[str, Any] = {"form": self._wire.form, **self._lengths(plan)}
        if plan.conversations:
            found["turns"] = self._conversations(plan)
        if plan.with_gateway:
            found["gateway"] = self._through_gateway(plan)
        found["idle_after"] = self._settles()
        found["seconds"] = round(time.monotonic() - began_s, 1)
        parts = [found, found.get("turns"), found.get("gateway")]
        found["ok"] = found["idle_after"] and not any(part and part["failed"] for part in parts)
        return found

    # Prompts --------------------------------------------------------------------------------------

    def _lengths(self, plan: Plan) -> dict[str, Any]:
        tally = Tally()
        handoffs = [
            (length, tokens)
            for length in plan.lengths
            for tokens in self._handoff_lengths(length, plan.handoffs)
        ]
        for length, tokens in handoffs:
            what = f"{length} tokens at {tokens}"
            with tally.attempt(what):
                prompt = draw(length, length)
                report = self._hand_off(prompt, tokens, salt=secrets.token_hex(8))
                self._judge(tally, what, report, prompt)
            if tally.is_hopeless:
                break
        lengths = len({length for length, _ in handoffs})
        if len(tally.answers) <= lengths // 2:
            tally.fail(f"{len(tally.answers)} answers to {lengths} prompts prove nothing")
        return tally.as_dict()

    def _handoff_lengths(self, length: int, which: str) -> list[int]:
        chosen = choose_handoff(length, self._wire.block_tokens, resumable=False).handoff_tokens
        found = {"last": [length - 1], "chosen": [chosen], "both": [length - 1, chosen]}[which]
        if not self._continues_in_prompts:
            found = [tokens for tokens in found if tokens == length - 1]
        return list(dict.fromkeys(found))

    @property
    def _continues_in_prompts(self) -> bool:
        """Whether the receiver can compute several tokens after a state."""
        return self._served.is_chunked or not self._target.is_vllm

    def _hand_off(self, prompt: list[int], tokens: int, *, salt: str) -> HandoffReport:
        source, target = self._source, self._target
        pair = EnginePair(source.url, target.url, source.kvd_url, target.kvd_url)
        request = HandoffRequest(
            prompt, NEW_TOKENS, salt, handoff_tokens=tokens, decode_fields=target.sampling
        )

        async def run() -> HandoffReport:
            async with asyncio.timeout(2 * REQUEST_S):
                return await run_handoff(pair, request, MonotonicClock())

        return asyncio.run(run())

    def _judge(self, tally: Tally, what: str, report: HandoffReport, prompt: list[int]) -> None:
        found = Answer(report.answer or [], report.logprobs)
        own = self._answers.of(self._target, prompt)
        tally.judge_tokens(what, found, own, self._answers.of(self._node, prompt))
        expected = self._wire.nbytes(report.handoff_tokens, report.skip_tokens)
        tally.judge_bytes(what, report.sent_bytes, expected)
        steps = {step.name: step for step in report.steps}
        prefill, commit = steps["prefill"], steps["commit"]
        tally.prefill_s.append(prefill.took_s)
        # Both steps begin at once. The receiver may commit before the prefill node has responded.
        tally.exposed_s.append(max(0.0, commit.took_s - prefill.took_s))

    # Conversations --------------------------------------------------------------------------------

    def _conversations(self, plan: Plan) -> dict[str, Any]:
        tally, resumed = Tally(), {"receiver_kept": 0, "sender_resumed": 0, "turned_back": 0}
        for number in range(plan.conversations):
            with tally.attempt(f"conversation {number}"):
                self._converse(tally, resumed, number)
            if tally.is_hopeless:
                break
        return {**tally.as_dict(), **resumed}

    def _converse(self, tally: Tally, resumed: dict[str, int], number: int) -> None:
        salt, seed = secrets.token_hex(8), 1_000 + number
        first = draw(TURNS[0], seed)
        report = self._hand_off(first, self._turn_tokens(TURNS[0]), salt=salt)
        self._judge(tally, "first turn", report, first)
        if self._source.is_vllm and not self._served.is_chunked:
            return  # it cannot compute a prompt after a prefix
        second = self._continued(first, report, TURNS[1], seed)
        report = self._hand_off(second, self._turn_tokens(TURNS[1]), salt=salt)
        self._judge(tally, "second turn", report, second)
        kept = self._wire.held_tokens(report.skip_tokens)
        crossed = self._turn_tokens(TURNS[0]) // self._wire.block_tokens * self._wire.block_tokens
        if kept == crossed:
            resumed["receiver_kept"] += 1
        else:
            tally.fail(f"second turn: the receiver keeps {kept} of {crossed} tokens that crossed")
        if report.prefill_cached:
            resumed["sender_resumed"] += 1
        else:
            tally.fail("second turn: the sender computed the whole prompt again")
        if not self._continues_in_prompts:
            return
        third = self._continued(second, report, TURNS[2], seed)
        back = Direction(
            self._target, self._source, self._node, self._served, self._wire, self._answers
        )
        report = back._hand_off(third, back._turn_tokens(TURNS[2]), salt=salt)
        back._judge(tally, "third turn, back", report, third)
        if report.prefill_cached:
            resumed["turned_back"] += 1
        else:
            tally.fail("third turn, back: the sender did not resume from what crossed")

    def _turn_tokens(self, length: int) -> int:
        if not self._continues_in_prompts:
            return length - 1
        return choose_handoff(length, self._wire.block_tokens, resumable=False).handoff_tokens

    def _continued(
        self, prompt: list[int], report: HandoffReport, length: int, seed: int
    ) -> list[int]:
        """The next turn's prompt: what was said so far, and something new."""
        said = [*prompt, *(report.answer or [])]
        return [*said, *draw(length - len(said), seed + length)]

    # The gateway ----------------------------------------------------------------------------------

    def _through_gateway(self, plan: Plan) -> dict[str, Any]:
        tally, crossed = Tally(), 0
        lengths = [n for n in plan.lengths if self._handoff_lengths(n, "chosen")]
        with tally.attempt("gateway"), gateway(self._source, self._target) as url:
            for length in lengths:
                prompt, what = draw(length, length), f"gateway, {length} tokens"
                with tally.attempt(what):
                    before = self._target.report().arrivals.committed
                    answer = generated(post(f"{url}/v1/completions", self._gateway_body(prompt)))
                    own = self._answers.of(self._target, prompt)
                    tally.judge_tokens(what, answer, own, self._answers.of(self._node, prompt))
                    if self._target.report().arrivals.committed == before + 1:
                        crossed += 1
                    else:
                        tally.fail(f"{what}: nothing was committed at the receiver")
                if tally.is_hopeless:
                    break
        found = tally.as_dict()
        for absent in ("bytes_equal", "sent_bytes", "prefill_s", "exposed_s"):
            del found[absent]
        return {**found, "crossed": crossed}

    def _gateway_body(self, prompt: list[int]) -> dict[str, Any]:
        return {
            **{"model": GATEWAY_MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS},
            **{"temperature": 0.0, "return_token_ids": True, "cache_salt": secrets.token_hex(8)},
            **self._target.sampling,
        }

    def _settles(self) -> bool:
        """Whether both kvds come to hold nothing but prefixes."""
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            with suppress(OSError):
                if self._source.is_idle() and self._target.is_idle():
                    return True
            time.sleep(POLL_S)
        return False


def draw(tokens: int, seed: int) -> list[int]:
    chance = random.Random(f"{tokens} {seed}")
    return [chance.randrange(256) for _ in range(tokens)]


# The grid -----------------------------------------------------------------------------------------


def parse_pair(text: str) -> tuple[str, str]:
    one, colon, two = text.partition(":")
    if not colon:
        raise InputError(f"{text!r} is not a pair", where="--pairs", fix="give names like node:tp2")
    for name in (one, two):
        if name != NODE:
            configuration_named(name)
    return (one, f"{two}#2" if one == two else two)


def refused(pair: tuple[str, str], served: ServedModel) -> str | None:
    """Why vLLM does not run this pair with this model; None when it does."""
    found = [VLLM_CONFIGURATIONS[base(name)].refusal(served) for name in pair if base(name) != NODE]
    return next((reason for reason in found if reason), None)


class Grid:
    """Every pair of one model, one after the other."""

    def __init__(self, rack: Rack, served: ServedModel, model: Path, plan: Plan) -> None:
        self._rack = rack
        self._served = served
        self._plan = plan
        self._answers = Answers()
        config = read_hf_config(model)
        self._spec = build_spec(
            config.geometries, kv_dtype="float32", state_dtype=config.state_dtype
        )

    def run(self, pair: tuple[str, str], directions: str) -> Iterator[dict[str, Any]]:
        """The results of the pair's directions."""
        ways = {"there": [pair], "back": [pair[::-1]], "both": [pair, pair[::-1]]}[directions]
        for source, target in ways:
            found = {"model": self._served.arch, "from": source, "to": target}
            reason = refused(pair, self._served)
            if reason is not None:
                yield {**found, "skipped": reason}
                continue
            say(f"{self._served.arch}: {source} to {target}")
            try:
                result = self._direction(pair, source)
            except Exception as error:  # of a server, which is a result here
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:2_000]}
            say(f"  {'ok' if result['ok'] else 'FAILED'}")
            if not result["ok"]:
                say(f"  {result.get('error') or json.dumps(result)[:2_000]}")
                self._rack.drop_dead()
            yield {**found, **result}

    def _direction(self, pair: tuple[str, str], source: str) -> dict[str, Any]:
        names = [*pair] if NODE in pair else [*pair, NODE]
        engines = dict(zip(names, self._rack.get(names), strict=True))
        ends = engines[source], engines[pair[1] if source == pair[0] else pair[0]]
        return Direction(*ends, engines[NODE], self._served, self._wire(*ends), self._answers).run(
            self._plan
        )

    def _wire(self, source: Engine, target: Engine) -> Wire:
        pools = source.report().pools
        compat = choose_compat([pool.compat for pool in pools], compats_of(target.report()))
        if compat is None:
            raise Failed(f"{source.name} and {target.name} have no form in common")
        (pool,) = [pool for pool in pools if pool.compat == compat]
        spec = self._spec if compat.form == CANONICAL else spec_of(pool.groups)
        return Wire(compat.form, spec, compat.block_tokens)


@dataclass(frozen=True, slots=True)
class Setup:
    python: Path  # with vLLM
    folder: Path  # for models and logs
    form: str
    directions: str  # both, there, back
    until_s: float  # no pair starts after this time


def run_model(
    arch: str, pairs: Sequence[tuple[str, str]], setup: Setup, plan: Plan
) -> Generator[dict[str, Any], None, None]:
    """The results of every pair with one model, as they come. The end of the iteration, also an
    early one, stops the model's servers."""
    served = SERVED_MODELS[arch]
    model = setup.folder / arch / "model"
    make_checkpoint(model, arch, served.size, force=True)
    rack = Rack(setup.python, model, served, setup.form)
    try:
        grid = Grid(rack, served, model, plan)
        for pair in pairs:
            if time.monotonic() > setup.until_s:
                found = {"model": arch, "from": pair[0], "to": pair[1]}
                yield {**found, "ok": False, "error": "not started: --minutes have passed"}
                continue
            yield from grid.run(pair, setup.directions)
    finally:
        rack.close()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@click.command(help=__doc__)
@python_option
@models_option(list(SERVED_MODELS), list(SERVED_MODELS))
@click.option(
    "--pairs",
    multiple=True,
    metavar="A:B",
    default=PAIRS,
    help="Pair of engines, see above; repeatable.  [default: " + " ".join(PAIRS) + "]",
)
@lengths_option(LENGTHS)
@click.option(
    "--directions",
    type=click.Choice(["both", "there", "back"]),
    default="both",
    show_default=True,
    help="Whether A hands over to B (there), B to A (back), or both.",
)
@click.option(
    "--handoffs",
    type=click.Choice(["both", "last", "chosen"]),
    default="both",
    show_default=True,
    help="Hand over at the last token but one, where a gateway would, or both.",
)
@click.option(
    "--conversations",
    default=CONVERSATIONS,
    show_default=True,
    help="Conversations of three turns per direction.",
)
@click.option("--gateway/--no-gateway", "with_gateway", help="Also send prompts to a gateway.")
@click.option(
    "--form",
    type=click.Choice(["auto", "canonical", "native"]),
    default="auto",
    show_default=True,
    help="Form of the vLLM servers. In the native form only twins hand over, such as tp1:tp1.",
)
@click.option("--minutes", default=240.0, show_default=True, help="No pair starts after this time.")
@logs_option
def main(
    python: Path,
    models: tuple[str, ...],
    pairs: tuple[str, ...],
    lengths: str,
    directions: str,
    handoffs: str,
    conversations: int,
    with_gateway: bool,
    form: str,
    minutes: float,
    logs: Path | None,
) -> None:
    wanted = [parse_pair(pair) for pair in pairs]
    if not 0 <= conversations <= 100:
        raise InputError(
            f"{conversations} is out of range", where="--conversations", fix="give 0 to 100"
        )
    plan = Plan(parse_lengths(lengths, MOST_TOKENS), conversations, with_gateway, handoffs)
    results: list[dict[str, Any]] = []
    complete = False
    signal.signal(signal.SIGTERM, _interrupt)  # so that servers are stopped
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pairs-")))
        setup = Setup(python, folder, form, directions, time.monotonic() + minutes * 60)
        try:
            for arch in models:
                with closing(run_model(arch, wanted, setup, plan)) as found:
                    results.extend(found)
            complete = True
        except KeyboardInterrupt:
            say("interrupted: the results are not complete")
    failed = [one for one in results if one.get("ok") is False]
    report = {
        "form": form,
        "lengths": list(plan.lengths),
        "new_tokens": NEW_TOKENS,
        "complete": complete,
        "directions": len(results),
        "failed": len(failed),
        "results": results,
    }
    print_json(report)
    sys.exit(0 if complete and not failed else 1)


if __name__ == "__main__":
    run_benchmark(main)
