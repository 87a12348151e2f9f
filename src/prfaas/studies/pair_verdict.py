"""Whether two engines can hand over to each other: in which form, at what cost, and if not, why.

A kvd grants a transfer only between engines of equal KV formats (`types.Compat`). In the canonical
form the format does not depend on how an engine lays its cache out, so that unlike engines have
equal formats; in a native form the engine's own blocks travel, and only twins have equal formats.

    KV formats          form now     form that is possible    because
    equal               theirs       theirs
    equal in one form   that one     that one                 native is preferred where both are
    another model       none         none                     the bytes mean something else
    another layout      none         canonical                every engine involved can convert
    another dtype       none         canonical                with a cast that an operator allows

Pure. `pair_check.py` asks the two kvds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prfaas.contracts.forms import choose_compat
from prfaas.kvspec import FullAttention, Group, KVSpec, LinearState, SlidingWindow
from prfaas.types import CANONICAL, Compat, Form

_VLLM: Final = "vllm "  # layouts of the connector's native form begin with it
_SETTINGS: Final = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class EngineSide:
    """One engine of a pair, as its kvd reports it, in one form."""

    name: str  # in messages, for example a URL
    compat: Compat
    spec: KVSpec
    capacity_bytes: int | None = None  # of the kvd's pool; None: the kvd does not report it
    other: EngineSide | None = None  # the same engine in its other form, if it has one

    @property
    def form(self) -> Form:
        return self.compat.form

    @property
    def forms(self) -> tuple[EngineSide, ...]:
        return (self,) if self.other is None else (self, self.other)

    @property
    def is_convertible(self) -> bool:
        """Whether the engine uses the canonical form, or can be started with it."""
        return self.form == "canonical" or self.compat.layout.startswith(_VLLM)


@dataclass(frozen=True, slots=True)
class PairLink:
    """The link between the two, and how fast the engines convert."""

    gbps: float
    rtt_s: float = 0.0
    convert_bytes_per_s: float | None = None  # None: the time to convert is not counted

    def transfer_s(self, nbytes: int) -> float:
        return nbytes * 8 / (self.gbps * 1e9) + self.rtt_s


@dataclass(frozen=True, slots=True)
class Difference:
    field: str
    a: str
    b: str
    fix: str
    final: bool = False  # no form of the KV cache bridges it


@dataclass(frozen=True, slots=True)
class FormCost:
    """What one hand-off costs in a form. `exact` is false where neither engine uses the form: the
    bytes then follow from the other form's groups."""

    form: Form
    nbytes: int
    link_s: float
    convert_s: float | None
    block_tokens: int
    exact: bool


@dataclass(frozen=True, slots=True)
class PairVerdict:
    form: Form | None  # the form in which the two hand over now; None: a grant is refused
    possible_form: Form | None  # the form after every fix; None: they can never hand over
    differences: tuple[Difference, ...]
    costs: tuple[FormCost, ...]  # canonical, then native
    warnings: tuple[str, ...]

    @property
    def fixes(self) -> tuple[str, ...]:
        """What to change, each step once. Where a difference is final, only that one matters."""
        final = [one for one in self.differences if one.final]
        return tuple(dict.fromkeys(one.fix for one in final or self.differences))


def judge(
    a: EngineSide,
    b: EngineSide,
    *,
    tokens: int,
    link: PairLink,
    native_block_tokens: int | None = None,
) -> PairVerdict:
    """The verdict for a hand-off of `tokens` tokens. `native_block_tokens` is the block size of an
    engine's native form where neither engine reports one; by default it is the KV format's."""
    compared, with_which = _compared(a, b)
    differences = tuple(_differences(compared, with_which))
    costs = _costs((*a.forms, *b.forms), tokens, link, native_block_tokens)
    if not differences:
        form: Form | None = compared.form
        possible = form
    else:
        form = None
        possible = None if any(one.final for one in differences) else "canonical"
    used = possible or "canonical"
    (nbytes,) = [cost.nbytes for cost in costs if cost.form == used]
    warnings = tuple(_warnings(compared, with_which, nbytes))
    return PairVerdict(form, possible, differences, costs, warnings)


def _compared(a: EngineSide, b: EngineSide) -> tuple[EngineSide, EngineSide]:
    """Both engines in the form in which they hand over. Where they do not: in the canonical form if
    they have it, because there they differ in the least."""
    chosen = choose_compat([one.compat for one in a.forms], [one.compat for one in b.forms])
    if chosen is not None:
        (mine,) = [one for one in a.forms if one.compat == chosen]
        (others,) = [one for one in b.forms if one.compat == chosen]
        return mine, others
    canonical = [[one for one in side.forms if one.form == CANONICAL] for side in (a, b)]
    return (canonical[0][0], canonical[1][0]) if all(canonical) else (a, b)


def whole_block_bytes(spec: KVSpec, tokens: int, block_tokens: int, skip_tokens: int = 0) -> int:
    """Bytes of a hand-off after `tokens` tokens when whole blocks travel, with their unused rows.
    The receiver has the first `skip_tokens` of full attention."""
    last = -(-tokens // block_tokens) * block_tokens
    skipped = min(skip_tokens // block_tokens * block_tokens, last)

    def layer_bytes(group: Group) -> int:
        match group:
            case LinearState():
                return group.layer_bytes(tokens)
            case SlidingWindow():
                first = group.first_token(tokens) // block_tokens * block_tokens
                return (last - first) * group.bytes_per_token
            case FullAttention():
                return (last - skipped) * group.bytes_per_token

    return sum(len(group.layers) * layer_bytes(group) for group in spec.groups)


# Differences -------------------------------------------------------------------------------------


def _differences(a: EngineSide, b: EngineSide) -> Iterator[Difference]:
    if a.compat == b.compat:
        yield from _group_differences(a, b)
        return
    both_canonical = a.form == b.form == "canonical"
    for field in Compat.__struct_fields__:
        one, two = getattr(a.compat, field), getattr(b.compat, field)
        if one == two or (field == "state_dtype" and not _states_differ(a, b)):
            continue
        fix, final = _fix(field, a, b, both_canonical=both_canonical)
        yield Difference(field, str(one), str(two), fix, final)


def _fix(field: str, a: EngineSide, b: EngineSide, *, both_canonical: bool) -> tuple[str, bool]:
    """(the fix, whether no form bridges the difference)."""
    match field:
        case "model":
            return "serve the same model on both", True
        case "revision":
            return "start both engines from the same checkpoint files", True
        case "kv_dtype" | "state_dtype":
            return (
                f"start both engines with one dtype, or allow a cast: set "
                f'"wire_{field}" in {_SETTINGS} of the vLLM servers to one dtype',
                False,
            )
    stuck = [side.name for side in (a, b) if not side.is_convertible]
    if stuck:
        return f"use an engine that has the canonical form instead of {' and '.join(stuck)}", True
    if not both_canonical:
        native = [side.name for side in (a, b) if side.form == "native"]
        return f'set "form": "auto" in {_SETTINGS} of {" and ".join(native)}', False
    if field == "block_tokens":
        return (
            f'set one size: "block_tokens" in {_SETTINGS} of a vLLM server, '
            "node.block_tokens of a prfaas node",
            False,
        )
    return "use the same version of prfaas on both", False


def _states_differ(a: EngineSide, b: EngineSide) -> bool:
    """A native format lists the dtypes of states and convolution histories together, and has "none"
    without linear layers; a canonical format always has the dtype of states only."""
    if a.form == b.form:
        return a.compat.state_dtype != b.compat.state_dtype
    found = [_state_dtypes(side) for side in (a, b)]
    return all(found) and found[0] != found[1]


def _state_dtypes(side: EngineSide) -> frozenset[str]:
    if not any(isinstance(group, LinearState) for group in side.spec.groups):
        return frozenset()
    if side.form == "canonical":
        return frozenset((side.compat.kv_dtype, side.compat.state_dtype))
    return frozenset(side.compat.state_dtype.split("+")) - {"none"}


def _group_differences(a: EngineSide, b: EngineSide) -> Iterator[Difference]:
    """Equal formats have equal groups, unless two versions read a model's config differently."""
    fix = "use the same version of prfaas on both"
    mine, others = ({group.name: group for group in side.spec.groups} for side in (a, b))
    for name in dict.fromkeys((*mine, *others)):
        one, two = _described(mine.get(name)), _described(others.get(name))
        if one != two:
            yield Difference(f"group {name}", one, two, fix)


def _described(group: Group | None) -> str:
    match group:
        case None:
            return "missing"
        case LinearState():
            size = f"{group.state_bytes} bytes per state"
        case SlidingWindow():
            size = f"{group.bytes_per_token} bytes per token, window {group.window}"
        case FullAttention():
            size = f"{group.bytes_per_token} bytes per token"
    return f"layers {', '.join(map(str, group.layers))}: {size}"


# Costs -------------------------------------------------------------------------------------------


def _costs(
    sides: Sequence[EngineSide], tokens: int, link: PairLink, native_block_tokens: int | None
) -> tuple[FormCost, FormCost]:
    return (
        _canonical_cost(_with_form(sides, CANONICAL), tokens, link),
        _native_cost(_with_form(sides, "native"), tokens, link, native_block_tokens),
    )


def _with_form(sides: Sequence[EngineSide], form: Form) -> EngineSide:
    return next((side for side in sides if side.form == form), sides[0])


def _canonical_cost(side: EngineSide, tokens: int, link: PairLink) -> FormCost:
    nbytes = side.spec.kv_bytes(tokens)
    rate = link.convert_bytes_per_s
    return FormCost(
        "canonical",
        nbytes,
        link.transfer_s(nbytes),
        None if rate is None else nbytes / rate,
        side.compat.block_tokens,
        exact=side.form == "canonical",
    )


def _native_cost(
    side: EngineSide, tokens: int, link: PairLink, block_tokens: int | None
) -> FormCost:
    is_native = side.form == "native"
    size = side.compat.block_tokens if is_native or block_tokens is None else block_tokens
    if is_native and not side.compat.layout.startswith(_VLLM):
        nbytes = side.spec.kv_bytes(tokens)  # only vLLM's blocks have no token axis
    else:
        nbytes = whole_block_bytes(side.spec, tokens, size)
    return FormCost("native", nbytes, link.transfer_s(nbytes), None, size, exact=is_native)


def _warnings(a: EngineSide, b: EngineSide, nbytes: int) -> Iterator[str]:
    for side in (a, b):
        if side.capacity_bytes is not None and nbytes > side.capacity_bytes:
            yield (
                f"the kvd of {side.name} has memory for {side.capacity_bytes:,} bytes, and this "
                f"hand-off takes {nbytes:,}: start it with more --memory"
            )
