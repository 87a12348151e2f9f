"""What `prfaas up` is to start: a deployment and its engines, made from a file, or from nothing.

From nothing: a tiny model made on the spot, and its profile measured here once; both are kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.config.deployment import (
    SLO,
    Cluster,
    Link,
    Lognormal,
    ModelSection,
    Trace,
)
from prfaas.config.gateway import GatewaySection
from prfaas.engine.checkpoint.architectures import DEFAULT_ARCH
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.attached_process import tether
from prfaas.launch.children import ChildDied
from prfaas.launch.commands import (
    ENGINE_ENVIRONMENT,
    VLLM_MAX_TOKENS,
    EngineKind,
    Engines,
    Host,
)
from prfaas.launch.deployment import serving_alone
from prfaas.launch.scaling import scaled_catalog, scaled_deployment
from prfaas.planner import baselines
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import BASELINES

CACHE = Path.home() / ".cache" / "prfaas"
MAKE_S = 600.0  # for another process to make and measure the tiny model
LOOK_S = 0.2  # between two tries to take its lock
MEMORY = "256MiB"  # of each kvd; its pages exist once they are used
TINY_WAN = Link("far", "near", gbps=1.0, rtt_ms=20.0)
TINY_MAX_TOKENS = 8192
# Engines compute in float32 there. In bfloat16, as on a GPU, near ties fall either way, and answers
# could not be compared token by token.
TINY_DEVICE = "cpu"
ACCELERATOR = "this-machine"
VLLM_ARCH = "falcon-h1"
# Scaled blocks of 64 tokens would be a few hundred bytes each: all bookkeeping, no KV.
EMULATED_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Prepared:
    deployment: Deployment
    engines: Engines


@dataclass(frozen=True, slots=True)
class Wan:
    """What `--wan` says; None: as the deployment has it."""

    gbps: float | None = None
    rtt_ms: float | None = None


def parse_wan(text: str) -> Wan:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        found = Wan(**{key: float(value) for key, value in pairs})
        if (found.gbps is not None and not found.gbps > 0) or (found.rtt_ms or 0) < 0:
            raise ValueError(text)
    except (ValueError, TypeError):
        fix = "give gbps=X,rtt_ms=Y, or one of them"
        raise InputError(f"{text!r}", where="--wan", fix=fix) from None
    return found


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks of `prfaas up` beside the deployment."""

    engine: EngineKind
    scales: Scales = Scales()
    baseline: str | None = None
    wan: Wan = Wan()
    port: int = 0
    python: Path | None = None  # vllm: the interpreter that has it
    device: str | None = None  # hf: as `prfaas node --device` takes it


def prepared(deployment: Deployment, file: Path, wish: Wish, folder: Path) -> Prepared:
    """`deployment` is what `file` says. What engines and gateway read beside it is written into
    `folder`."""
    deployment = _absolute(deployment, file.resolve().parent)
    study = Study(file.resolve(), "exact")
    study.problem(deployment)  # whatever is wrong with it is said before anything is started
    if wish.baseline is not None:
        deployment = baseline_deployment(deployment, study, wish.baseline)
    deployment = _with_wan(deployment, wish.wan)
    section = msgspec.structs.replace(deployment.gateway, port=wish.port)
    deployment = msgspec.structs.replace(deployment, gateway=section)
    if wish.engine == "emulated":
        return _emulated(deployment, study, folder, wish.scales)
    if wish.scales != Scales():
        raise InputError("real engines keep their own time", where="--*-scale", fix="leave it out")
    if deployment.model.config is None:
        raise InputError(
            "a real engine needs the model's checkpoint",
            file=file,
            where="model.config",
            fix="name its config.json, or use --engine emulated",
        )
    directory = str(Path(deployment.model.config).parent)
    name = deployment.model.name
    return Prepared(deployment, _real_engines(wish, directory, name))


def _real_engines(wish: Wish, checkpoint: str, name: str) -> Engines:
    cores = sorted(os.sched_getaffinity(0))
    return Engines(
        wish.engine,
        checkpoint,
        name,
        MEMORY,
        python=wish.python,
        cores=cores,
        device=wish.device,
    )


def _emulated(deployment: Deployment, study: Study, folder: Path, scales: Scales) -> Prepared:
    """Engines and gateway read the same scaled catalog: one world."""
    path = folder / "catalog.toml"
    spec = study.problem(deployment).spec
    text = scaled_catalog(deployment, study.catalog(deployment), spec, scales)
    path.write_text(text, encoding="utf-8")
    small = scaled_deployment(deployment, scales)
    small = msgspec.structs.replace(small, catalog=[*deployment.catalog, str(path)])
    catalogs = [Path(one) for one in small.catalog]
    words = None if small.gateway.tokenizer is None else Path(small.gateway.tokenizer)
    name = deployment.model.name
    return Prepared(
        small, Engines("emulated", name, name, MEMORY, EMULATED_BLOCK_TOKENS, catalogs, words)
    )


def baseline_deployment(deployment: Deployment, study: Study, name: str) -> Deployment:
    """The deployment that `planner.baselines` compares this one with."""
    made = getattr(baselines, name)(study.problem(deployment))
    if made is None:
        raise InputError(
            f"there is no {name} deployment of this one",
            where="--baseline",
            fix="naive needs a prfaas cluster, homogeneous two instances",
        )
    (local,) = deployment.of_kind("pd")
    prefill = made.local.fixed_prefill
    local = msgspec.structs.replace(
        local,
        gpus=made.local.pool.gpus,
        prefill=prefill,
        decode=None if prefill is None else made.local.pool.instances - prefill,
    )
    kept = {remote.pool.cluster for remote in made.remotes} | {local.name}
    clusters = [local if c.name == local.name else c for c in deployment.clusters if c.name in kept]
    rules = msgspec.structs.replace(
        deployment.scheduler, policy=BASELINES[name], threshold_tokens=made.fixed_threshold
    )
    return msgspec.structs.replace(
        deployment,
        clusters=clusters,
        links=[link for link in deployment.links if {link.source, link.target} <= kept],
        scheduler=rules,
    )


def _with_wan(deployment: Deployment, wan: Wan) -> Deployment:
    def changed(link: Link) -> Link:
        if link.source == link.target:
            return link
        gbps = link.gbps if wan.gbps is None else wan.gbps
        rtt_ms = link.rtt_ms if wan.rtt_ms is None else wan.rtt_ms
        return msgspec.structs.replace(link, gbps=gbps, rtt_ms=rtt_ms, via=None)

    return msgspec.structs.replace(deployment, links=[changed(link) for link in deployment.links])


def _absolute(deployment: Deployment, folder: Path) -> Deployment:
    """Paths are relative to the file they stand in, and it will be another one."""

    def at(name: str | None) -> str | None:
        return None if name is None else str(folder / name)

    workload = deployment.workload
    if isinstance(workload, Trace):
        workload = msgspec.structs.replace(workload, path=str(folder / workload.path))
    section = deployment.gateway
    return msgspec.structs.replace(
        deployment,
        model=msgspec.structs.replace(deployment.model, config=at(deployment.model.config)),
        workload=workload,
        gateway=msgspec.structs.replace(
            section,
            tokenizer=at(section.tokenizer),
            keys=[msgspec.structs.replace(key, file=at(key.file)) for key in section.keys],
        ),
        catalog=[str(folder / name) for name in deployment.catalog],
    )


# From nothing -------------------------------------------------------------------------------------


def tiny_deployment(cache: Path, wish: Wish, say: Callable[[str], None]) -> tuple[Deployment, Path]:
    """The tiny Kimi-Linear model (for vLLM Falcon-H1, which it has on CPUs) on one PrfaaS node, one
    PD prefill node and one PD decode node; and its profile's file. Both clusters are this machine,
    so the plan's threshold is where two equal prefill nodes have equally much to do with the
    traffic stated here: most prompts short, most tokens in long ones."""
    vllm = wish.engine == "vllm"
    arch = VLLM_ARCH if vllm else DEFAULT_ARCH
    checkpoint = cache / f"tiny-{arch}"
    profile = checkpoint / ("profile-vllm.toml" if vllm else "profile.toml")
    if not profile.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f"tiny-{arch}.lock", say):
            _make_and_measure(checkpoint, profile, arch, wish, say)
    max_tokens = VLLM_MAX_TOKENS if vllm else TINY_MAX_TOKENS
    longest = max_tokens - 1024  # an answer must fit behind it
    deployment = Deployment(
        model=ModelSection(checkpoint.name, str(checkpoint / "config.json"), None, max_tokens),
        workload=Lognormal(6.0, 1.2, min_tokens=16, max_tokens=longest, output_tokens=32),
        slo=SLO(output_tokens_per_s=2.0),
        clusters=[
            Cluster("far", "prfaas", ACCELERATOR, gpus=1, gpus_per_instance=1),
            Cluster("near", "pd", ACCELERATOR, gpus=2, gpus_per_instance=1, prefill=1, decode=1),
        ],
        links=[TINY_WAN],
        gateway=GatewaySection(tokenizer=str(checkpoint)),
        catalog=[str(profile)],
    )
    return deployment, profile


def _make_and_measure(
    checkpoint: Path, profile: Path, arch: str, wish: Wish, say: Callable[[str], None]
) -> None:
    """What is there already is kept: another process may have been faster."""
    if not (checkpoint / "config.json").is_file():
        say("making a tiny model (once)")
        _make(checkpoint, arch)
    if profile.is_file():
        return
    say("measuring it on this machine (once, some seconds)")
    # A file under its final name is complete, even if this process is killed.
    unfinished = profile.with_name(f"{profile.name}.unfinished")
    points = ["--rounds", "2", "--accelerator", ACCELERATOR, "--out", str(unfinished)]
    if wish.engine == "vllm":
        _measure_vllm(checkpoint, wish, points)
    else:
        points += ["--lengths", "64,512,2048,4096", "--batches", "1,2,4"]
        points += [] if wish.device is None else ["--device", wish.device]
        _prfaas("profile", "--model", str(checkpoint), *points)
    unfinished.rename(profile)


@contextmanager
def _alone(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Several commands may be started at once on a new machine. One of them makes and measures the
    model, which then is measured undisturbed by the others. The lock ends with its process."""
    clock = MonotonicClock()
    until_s = clock.now() + MAKE_S
    with lock.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.now() > until_s:
                    raise InputError(
                        f"another process has held it for {MAKE_S:g} s",
                        file=lock,
                        fix="end the other `prfaas up` or `prfaas demo` and try again",
                    ) from None
            if not told:
                say("waiting for another process that makes the tiny model")
                told = True
            time.sleep(LOOK_S)
        yield


def _measure_vllm(checkpoint: Path, wish: Wish, points: list[str]) -> None:
    """One server alone, over HTTP."""
    engines = _real_engines(wish, str(checkpoint), checkpoint.name)
    host = Host("measured", "near", ACCELERATOR, 1)

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
            async with serving_alone(host, engines, Path(name), tether()) as url:
                # A step has room for one block: a prompt waits until nothing decodes, so
                # sequences that come one after another never run together.
                at = ["--lengths", "64,512,2048", "--batches", "1"]
                await asyncio.to_thread(_prfaas, "profile", "--url", url, *at, *points)

    try:
        asyncio.run(run())
    except ChildDied as error:
        raise InputError(str(error), where="--vllm-python") from None


def _make(checkpoint: Path, arch: str) -> None:
    """Under another name first: a checkpoint that is there is whole."""
    unfinished = checkpoint.with_name(f"{checkpoint.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    _prfaas("model", "make", str(unfinished), "--arch", arch)
    unfinished.rename(checkpoint)


def _prfaas(*arguments: str) -> None:
    """In a process of its own: nothing here needs torch afterwards. With as many threads as the
    engines get, so that a profile is of what they will do."""
    done = subprocess.run(
        [sys.executable, "-m", "prfaas", *arguments],
        env={**os.environ, **ENGINE_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # libraries chat there; it is of interest only after a failure
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it did not say why"]
        raise InputError(f"prfaas {arguments[0]} failed: {why[0]}")
