"""vLLM's real scheduler and our connector while the kvd of the host is restarted under them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prfaas.types import Grant
from tests.vllm import kvds
from tests.vllm.engine_free import FAILED, EngineFree
from tests.vllm.models import falcon
from tests.vllm.test_scheduler_side import Pair, asking, checkpoint, prompt_of
from tests.waiting import wait_until

__all__ = ["checkpoint"]
TOKENS, TAIL = 512, 30
FIRST, SECOND = prompt_of(700, seed=1), prompt_of(TOKENS + TAIL, seed=2)


@contextmanager
def engines(checkpoint: Path, folder: Path) -> Iterator[Pair]:
    source, target = (kvds.start(folder / name) for name in "pd")
    made: list[EngineFree] = []
    both: Pair | None = None
    try:
        made += [EngineFree(checkpoint, falcon(), kvd.socket) for kvd in (source, target)]
        both = Pair(*made, source, target)
        yield both
    finally:
        for engine in made:
            engine.close()
        for kvd in (both.source, both.target) if both is not None else (source, target):
            kvds.stop(kvd)


def restart(kvd: kvds.Kvd) -> kvds.Kvd:
    """The scheduler's side and the worker have registered with the new one."""
    kvds.stop(kvd)
    anew = kvds.start(kvd.socket)
    wait_until(lambda: sum(engine.processes for engine in anew.report().engines) == 2)
    return anew


def test_a_prefill_from_before_a_restart_never_becomes_the_kv_of_another(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The first prefill holds lease 1 of the old kvd, the second one lease 1 of the new kvd."""
    with engines(checkpoint, tmp_path) as pair:
        old = pair.grant(FIRST, len(FIRST))
        pair.prefill.add("first", FIRST, asking(old, len(FIRST)))
        pair.source = restart(pair.source)
        params = pair.hand_off("second", SECOND, TOKENS)
        assert params["do_remote_prefill"]
        pair.decode.add("second", SECOND, params)
        pair.decode.run("second")
        assert pair.decode.resumed["second"] == pair.prefill.left["second"]
        lost = pair.prefill.run("first")
        assert lost["error"]["code"] == "transfer_lost" and not lost["do_remote_prefill"]
        pair.target.abort(old.transfer_id)
        pair.idle()


def test_a_decode_from_before_a_restart_is_lost(checkpoint: Path, tmp_path: Path) -> None:
    """Another transfer has the same lease id at the new kvd."""
    with engines(checkpoint, tmp_path) as pair:
        first = pair.hand_off("first", FIRST, len(FIRST) - 1)
        pair.decode.add("first", FIRST, first)
        pair.target = restart(pair.target)
        second = pair.hand_off("second", SECOND, TOKENS)
        pair.decode.add("second", SECOND, second)
        assert pair.decode.run("first") == FAILED
        pair.decode.run("second")
        assert pair.decode.resumed["second"] == pair.prefill.left["second"]
        pair.idle()


def test_a_prefill_that_waits_while_its_kvd_restarts_is_not_computed(
    checkpoint: Path, tmp_path: Path
) -> None:
    with engines(checkpoint, tmp_path) as pair:
        grant = pair.grant(FIRST, len(FIRST))
        assert isinstance(grant, Grant)
        request = pair.prefill.add("waiting", FIRST, asking(grant, len(FIRST)))
        pair.source = restart(pair.source)
        answer = pair.prefill.run("waiting")
        assert answer["error"]["code"] == "transfer_lost"
        assert request.num_prompt_tokens == 1
        pair.target.abort(grant.transfer_id)
        pair.idle()
