"""Whatever a request carries and whatever fails inside the connector: that request ends with an
error, the engine and its other requests go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.vllm import kvds
from tests.vllm.engine_free import EngineFree
from tests.vllm.models import falcon
from tests.vllm.test_scheduler_side import TAIL, Pair, asking, checkpoint, prompt_of

__all__ = ["checkpoint"]
TOKENS = 300
HIDDEN = 8


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kvds")
    with kvds.kvd(folder / "p") as source, kvds.kvd(folder / "d") as target:
        engines = [EngineFree(checkpoint, falcon(), kvd.socket) for kvd in (source, target)]
        try:
            yield Pair(*engines, source, target)
        finally:
            for engine in engines:
                engine.close()


@pytest.fixture(autouse=True)
def unharmed(pair: Pair) -> Iterator[None]:
    """After every test both engines serve, and nothing is held."""
    yield
    prompt = prompt_of(TOKENS + TAIL, seed=99)
    params = pair.hand_off("after", prompt, TOKENS)
    pair.decode.add("after", prompt, params)
    pair.decode.run("after")
    assert pair.decode.resumed["after"] == pair.prefill.left["after"]
    for engine in (pair.prefill, pair.decode):
        for name in list(engine.answers):
            for seen in (engine.answers, engine.resumed, engine.left):
                seen.pop(name, None)
    pair.idle()


def add(engine: EngineFree, name: str, params: Any, **prompt: Any) -> Request:
    """A request as vLLM makes it, with any kind of prompt."""
    extra = {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args=extra)
    request = Request(name, prompt.pop("ids", None), sampling, None, **prompt)
    sampling.update_from_generation_config({}, None)
    engine.scheduler.add_request(request)
    return request


def embeds(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, HIDDEN)


# Requests -----------------------------------------------------------------------------------------


@pytest.mark.xfail(strict=True, reason="the connector asserts token ids, and reads an object")
@pytest.mark.parametrize("grant", ["valid", "none"])
@pytest.mark.parametrize("mixed", [False, True], ids=["embeddings", "mixed"])
def test_embeddings_are_not_handed_off(pair: Pair, grant: str, mixed: bool) -> None:
    """Hashes are of token ids: the state of embeddings would get the name of another prompt."""
    ids = prompt_of(TOKENS, seed=1)
    granted = pair.grant(ids, TOKENS)
    params = asking(granted, TOKENS) if grant == "valid" else {"do_remote_decode": True}
    more = {"ids": ids, "prompt_is_token_ids": [True] * 10 + [False] * (TOKENS - 10)}
    request = add(
        pair.prefill, "embeds", params, prompt_embeds=embeds(TOKENS), **(more if mixed else {})
    )
    answer = pair.prefill.run("embeds")
    assert answer["error"]["code"] == "invalid_request" and not answer["do_remote_prefill"]
    assert request.num_prompt_tokens == 1 == request.num_tokens - request.num_output_tokens
    pair.target.abort(granted.transfer_id)


@pytest.mark.xfail(strict=True, reason="the connector asserts token ids, and reads an object")
@pytest.mark.parametrize("params", ["do_remote_decode", ["do_remote_prefill"], 7, 1.5])
def test_parameters_that_are_not_an_object_are_refused(pair: Pair, params: Any) -> None:
    """vLLM's `vllm_xargs` lets them through."""
    request = add(pair.prefill, "odd", params, ids=prompt_of(TOKENS))
    answer = pair.prefill.run("odd")
    assert answer["error"]["code"] == "invalid_request"
    assert request.num_prompt_tokens == 1
