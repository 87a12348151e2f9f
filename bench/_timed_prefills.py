"""Prefills in one vLLM engine, each with the time that the connector's hooks take.

For `bench/conversion_cost.py`, which starts this program in an environment with vLLM, possibly with
another version of prfaas. Each line of the standard input is a number of tokens; the answer to each
is a line of JSON. Scheduler and worker are in this process, so that all hooks can be timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

WORKER_HOOKS = ("bind_connector_metadata", "save_kv_layer", "wait_for_save", "start_load_kv")
SCHEDULER_HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "request_finished_all_groups"),
)
COPIES = {  # where a version of prfaas copies a layer's tokens
    "prfaas.integrations.vllm.caches.layer_copies": ("NativeCopy.save",),
    "prfaas.integrations.vllm.caches.canonical_copies": ("AttentionCopy.save", "StateCopy.save"),
    "prfaas.integrations.vllm.worker_side": ("copy_out",),
}
COMMIT_S = 60.0
ONLY_NATIVE = "only-native"  # of a version that has no other form, and no setting for it


class Spent:
    """Wall time and CPU time of calls, by what they are for."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}
        self._inside: set[str] = set()

    def wrap(self, owner: Any, name: str, what: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if what in self._inside:  # a hook that calls another one is counted once
                return call(*args, **kwargs)
            self._inside.add(what)
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside.discard(what)
                self._add(what, time.perf_counter() - wall_s, time.thread_time() - cpu_s)

        setattr(owner, name, timed)

    def _add(self, what: str, wall_s: float, cpu_s: float) -> None:
        self.wall_s[what] = self.wall_s.get(what, 0.0) + wall_s
        self.cpu_s[what] = self.cpu_s.get(what, 0.0) + cpu_s

    def take(self) -> dict[str, float]:
        found = {f"{what}_s": value for what, value in self.wall_s.items()}
        found |= {f"{what}_cpu_s": value for what, value in self.cpu_s.items()}
        self.wall_s, self.cpu_s = {}, {}
        return found


def time_hooks(spent: Spent) -> None:
    import importlib

    from prfaas.integrations.vllm import PrfaasConnector

    for name in WORKER_HOOKS:
        spent.wrap(PrfaasConnector, name, "worker")
    for name in SCHEDULER_HOOKS:
        spent.wrap(PrfaasConnector, name, "scheduler")
    for module_name, functions in COPIES.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for path in functions:
            owner: Any = module
            *classes, name = path.split(".")
            for part in classes:
                owner = getattr(owner, part)
            if hasattr(owner, name):
                spent.wrap(owner, name, "copy")


class Receiver:
    """A kvd that takes what the engine hands over, and an engine without a model at it."""

    def __init__(self, source_url: str, url: str, socket: str, *, native: bool) -> None:
        import msgspec

        from prfaas.contracts.kvd_api import KvdReport, spec_of
        from prfaas.kvd.engine_socket.client import KvdClient

        with urllib.request.urlopen(f"{source_url}/v1/stats", timeout=30) as answer:
            pool = msgspec.json.decode(answer.read(), type=KvdReport).pool
        assert pool is not None, "the engine has not registered"
        assert (pool.compat.layout == "canonical") != native, pool.compat
        self._source_url = source_url
        self._compat = pool.compat
        self._url = url
        self._engine = KvdClient(
            socket,
            engine_id="receiver",
            spec=spec_of(pool.groups),
            block_tokens=pool.block_tokens,
            compat=pool.compat,
            whole_blocks=native,
        )

    def grant(self, prompt: list[int]) -> dict[str, Any]:
        import msgspec

        from prfaas.cache.hashing import block_hashes
        from prfaas.contracts.kvd_api import OpenTransfer

        hashes = block_hashes(prompt, self._compat.block_tokens)
        body = msgspec.json.encode(OpenTransfer(tuple(hashes), len(prompt), self._compat))
        request = urllib.request.Request(f"{self._url}/v1/open", body)
        with urllib.request.urlopen(request, timeout=30) as answer:
            grant: dict[str, Any] = json.load(answer)
        assert "transfer_id" in grant, grant
        return grant

    def take(self, grant: dict[str, Any]) -> int:
        """Waits for the commit, gives the pages back, and returns the bytes that were sent."""
        url = f"{self._url}/v1/transfers/{grant['transfer_id']}?wait_s={COMMIT_S}"
        with urllib.request.urlopen(url, timeout=COMMIT_S + 30) as answer:
            status = json.load(answer)
        assert status["state"] == "committed", status
        self._engine.attach(grant["transfer_id"]).release()
        url = (
            f"{self._source_url}/v1/transfers/{grant['transfer_id']}"  # the receiver's has a bound
        )
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(json.load(answer)["nbytes"])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "form", "kvd", "kvd-url", "target", "target-url", "settings"):
        parser.add_argument(f"--{name}", default="")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to the standard output
    from vllm import LLM, SamplingParams

    settings = json.loads(arguments.settings)
    spent = Spent()
    if arguments.form:
        time_hooks(spent)
        extra = {"kvd": arguments.kvd}
        if arguments.form != ONLY_NATIVE:
            extra["form"] = arguments.form
        settings["kv_transfer_config"] = {
            "kv_connector": "PrfaasConnector",
            "kv_connector_module_path": "prfaas.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    engine = LLM(model=arguments.model, **settings)
    receiver = None
    if arguments.form:
        receiver = Receiver(
            arguments.kvd_url,
            arguments.target_url,
            arguments.target,
            native=arguments.form != "canonical",
        )
    answers.write('"ready"\n')
    for line in sys.stdin:
        prompt = [random.randrange(256) for _ in range(int(line))]
        # The engine computes one token more than it hands over, as for a request that continues.
        grant = receiver.grant(prompt) if receiver is not None else None
        params = {"do_remote_decode": True, "grant": grant, "handoff_tokens": len(prompt)}
        asked = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            extra_args=None if grant is None else {"kv_transfer_params": params},
        )
        spent.take()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        found: dict[str, Any] = {
            "prefill_s": time.perf_counter() - wall_s,
            "prefill_cpu_s": time.process_time() - cpu_s,
            **spent.take(),
        }
        if receiver is not None and grant is not None:
            found["sent_bytes"] = receiver.take(grant)
        answers.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
