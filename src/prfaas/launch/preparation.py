"""Prepares what `prfaas up` starts: a deployment and its engines, from a file or from nothing.

From nothing: a tiny model is made and its profile is measured on this machine, once; both are kept.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
    WorkloadSection,
)
from prfaas.config.gateway import GatewaySection
from prfaas.config.tls import PATHS as TLS_PATHS
from prfaas.engine.checkpoint.architectures import DEFAULT_ARCH
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.interpreter import module_command
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import ChildDied
from prfaas.launch.commands import VLLM_MAX_TOKENS
from prfaas.launch.deployment import single_engine
from prfaas.launch.scaling import scaled_catalog, scaled_deployment
from prfaas.launch.services.hosts import EngineKind, EngineSpec, Host
from prfaas.planner import baselines
from prfaas.studies.network_plans import NetworkStudy
from prfaas.studies.problem_files import Study
from prfaas.studies.simulation_cases import BASELINES

CACHE = Path.home() / ".cache" / "prfaas"
MAKE_S = 600.0  # for another process to make and measure the tiny model
RETRY_S = 0.2  # between two attempts to take its lock
MEMORY = "256MiB"  # of each kvd; the kernel allocates a page at its first use
TINY_WAN = Link("far", "near", gbps=1.0, rtt_ms=20.0)
TINY_MAX_TOKENS = 8192
# On the CPU, engines compute in float32. In bfloat16, as on a GPU, near ties resolve differently
# from run to run, and responses could not be compared token by token.
TINY_DEVICE = "cpu"
ACCELERATOR = "this-machine"
VLLM_ARCH = "falcon-h1"
# Scaled blocks of 64 tokens would be a few hundred bytes each: more bookkeeping than KV.
EMULATED_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A deployment that can be started, and its engines."""

    deployment: Deployment
    engines: EngineSpec


@dataclass(frozen=True, slots=True)
class Wan:
    """Values of `--wan`. None keeps the deployment's value."""

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
        raise InputError(f"{text!r} is not a WAN", where="--wan", fix=fix) from None
    return found


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of `prfaas up` beside the deployment."""

    engine: EngineKind
    scales: Scales = Scales()
    baseline: str | None = None
    wan: Wan = Wan()
    port: int = 0
    python: Path | None = None  # vllm: the interpreter that has it
    device: str | None = None  # hf: as `prfaas node --device` takes it


def prepare_launch(
    deployment: Deployment, file: Path, options: LaunchOptions, folder: Path
) -> LaunchPlan:
    """`deployment` was read from `file`. The other files that engines and gateway read are written
    into `folder`."""
    deployment = with_absolute_paths(deployment, file.resolve().parent)
    study = NetworkStudy(file.resolve(), "exact")
    study.network(deployment)  # raises for a mistake before any process is started
    if options.baseline is not None:
        deployment = baseline_deployment(deployment, study, options.baseline)
    deployment = _with_wan(deployment, options.wan)
    section = msgspec.structs.replace(deployment.gateway, port=options.port)
    deployment = msgspec.structs.replace(deployment, gateway=section)
    if options.engine == "emulated":
        return _emulated(deployment, study, folder, options.scales)
    if options.scales != Scales():
        raise InputError(
            "only emulated engines can be scaled", where="--*-scale", fix="remove the flag"
        )
    if deployment.model.config is None:
        raise InputError(
            "a real engine needs the model's checkpoint",
            file=file,
            where="model.config",
            fix="set it to the checkpoint's config.json, or use --engine emulated",
        )
    directory = str(Path(deployment.model.config).parent)
    name = deployment.model.name
    return LaunchPlan(deployment, _real_engines(options, directory, name))


def _real_engines(options: LaunchOptions, checkpoint: str, name: str) -> EngineSpec:
    cores = sorted(os.sched_getaffinity(0))
    return EngineSpec(
        options.engine,
        checkpoint,
        name,
        MEMORY,
        python=options.python,
        cores=cores,
        device=options.device,
    )


def _emulated(
    deployment: Deployment, study: NetworkStudy, folder: Path, scales: Scales
) -> LaunchPlan:
    """Engines and gateway read the same scaled catalog, so that predictions match."""
    small = emulated_deployment(deployment, study, folder, scales)
    catalogs = [Path(one) for one in small.catalog]
    tokenizer = None if small.gateway.tokenizer is None else Path(small.gateway.tokenizer)
    name = deployment.model.name
    return LaunchPlan(
        small,
        EngineSpec("emulated", name, name, MEMORY, EMULATED_BLOCK_TOKENS, catalogs, tokenizer),
    )


def emulated_deployment(
    deployment: Deployment, study: NetworkStudy, folder: Path, scales: Scales
) -> Deployment:
    """The scaled deployment. Its last catalog is a new file in `folder`, with the times that the
    plan of the deployment takes: measured, published or estimated."""
    path = folder / "catalog.toml"
    problems = [home.problem for home in study.network(deployment).homes]
    text = scaled_catalog(deployment.model.name, problems, scales)
    path.write_text(text, encoding="utf-8")
    small = scaled_deployment(deployment, scales)
    return msgspec.structs.replace(small, catalog=[*deployment.catalog, str(path)])


def baseline_deployment(deployment: Deployment, study: Study, name: str) -> Deployment:
    """The deployment that `planner.baselines` compares this one with."""
    if len(deployment.of_kind("pd")) > 1:
        raise InputError(
            "baselines have one pd cluster, and the deployment has several",
            where="--baseline",
            fix="leave it out",
        )
    made = getattr(baselines, name)(study.problem(deployment))
    if made is None:
        raise InputError(
            f"this deployment has no {name} baseline",
            where="--baseline",
            fix="naive needs a prfaas cluster, homogeneous needs two instances",
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


def with_absolute_paths(deployment: Deployment, folder: Path) -> Deployment:
    """Makes paths absolute: they are relative to the file, and processes read a copy of it."""

    def at(name: str | None) -> str | None:
        return None if name is None else str(folder / name)

    def with_path(section: WorkloadSection) -> WorkloadSection:
        if isinstance(section, Trace):
            return msgspec.structs.replace(section, path=str(folder / section.path))
        return section

    clusters = [
        cluster
        if cluster.workload is None
        else msgspec.structs.replace(cluster, workload=with_path(cluster.workload))
        for cluster in deployment.clusters
    ]
    section = deployment.gateway
    return msgspec.structs.replace(
        deployment,
        model=msgspec.structs.replace(deployment.model, config=at(deployment.model.config)),
        workload=with_path(deployment.workload),
        clusters=clusters,
        gateway=msgspec.structs.replace(
            section,
            tokenizer=at(section.tokenizer),
            operator_key_file=at(section.operator_key_file),
            metrics_key_file=at(section.metrics_key_file),
            member_key_file=at(section.member_key_file),
            salt_file=at(section.salt_file),
            tls=msgspec.structs.replace(
                section.tls, **{name: at(getattr(section.tls, name)) for name in TLS_PATHS}
            ),
            keys=[msgspec.structs.replace(key, file=at(key.file)) for key in section.keys],
        ),
        catalog=[str(folder / name) for name in deployment.catalog],
    )


# From nothing -------------------------------------------------------------------------------------


async def tiny_deployment(
    cache: Path, options: LaunchOptions, say: Callable[[str], None]
) -> tuple[Deployment, Path]:
    """A tiny Kimi-Linear model (for vLLM Falcon-H1, which vLLM supports on CPUs) on one PrfaaS
    node, one PD prefill node and one PD decode node; and the file of its profile. Both clusters are
    this machine, so the plan's threshold gives two equal prefill nodes the same work under the
    workload below: most prompts are short, and most tokens are in long prompts."""
    vllm = options.engine == "vllm"
    arch = VLLM_ARCH if vllm else DEFAULT_ARCH
    checkpoint = cache / f"tiny-{arch}"
    profile = checkpoint / ("profile-vllm.toml" if vllm else "profile.toml")
    if not profile.is_file():
        await asyncio.to_thread(cache.mkdir, parents=True, exist_ok=True)
        async with _exclusive(cache / f"tiny-{arch}.lock", say):
            await _make_and_measure(checkpoint, profile, arch, options, say)
    max_tokens = VLLM_MAX_TOKENS if vllm else TINY_MAX_TOKENS
    longest = max_tokens - 1024  # a response must fit after it
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


async def _make_and_measure(
    checkpoint: Path, profile: Path, arch: str, options: LaunchOptions, say: Callable[[str], None]
) -> None:
    """Keeps what exists: another process may have made it meanwhile."""
    if not (checkpoint / "config.json").is_file():
        say("making a tiny model (once)")
        await asyncio.to_thread(_make, checkpoint, arch)
    if await asyncio.to_thread(profile.is_file):
        return
    say("measuring the tiny model on this machine (once, some seconds)")
    # A file under its final name is complete, even if this process is killed.
    unfinished = profile.with_name(f"{profile.name}.unfinished")
    await _measure(checkpoint, unfinished, options)
    unfinished.rename(profile)


@asynccontextmanager
async def _exclusive(lock: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Holds a lock. Several commands may start at once on a new machine; one of them makes and
    measures the model while the others wait. The kernel releases the lock when the process ends."""
    clock = MonotonicClock()
    until_s = clock.now() + MAKE_S
    with lock.open("w") as file:
        announced = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.now() > until_s:
                    raise InputError(
                        f"another process has held the lock for {MAKE_S:g} s",
                        file=lock,
                        fix="stop the other `prfaas up` or `prfaas demo`, and retry",
                    ) from None
            if not announced:
                say("waiting for another process that makes the tiny model")
                announced = True
            await asyncio.sleep(RETRY_S)
        yield


async def _measure(checkpoint: Path, profile: Path, options: LaunchOptions) -> None:
    """Measures one engine over HTTP, as others would, and writes its profile."""
    engines = _real_engines(options, str(checkpoint), checkpoint.name)
    host = Host("measured", "near", ACCELERATOR, 1)
    points = ["--lengths", "64,512,2048,4096", "--batches", "1,2,4"]
    if options.engine == "vllm":
        # A step holds one block, so a prompt waits until no sequence decodes, and sequences that
        # arrive one after another never run together.
        points = ["--lengths", "64,512,2048", "--batches", "1"]
    points += ["--rounds", "2", "--accelerator", ACCELERATOR, "--out", str(profile)]
    try:
        with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
            async with single_engine(host, engines, Path(name), attached_prefix()) as url:
                await asyncio.to_thread(_prfaas, "profile", "--url", url, *points)
    except ChildDied as error:
        where = "--vllm-python" if options.engine == "vllm" else None
        raise InputError(str(error), where=where) from None


def _make(checkpoint: Path, arch: str) -> None:
    """Makes the checkpoint under another name first, so that an existing one is complete."""
    unfinished = checkpoint.with_name(f"{checkpoint.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    _prfaas("model", "make", str(unfinished), "--arch", arch)
    unfinished.rename(checkpoint)


def _prfaas(*arguments: str) -> None:
    """Runs a `prfaas` command in another process, so that this one does not import torch."""
    done = subprocess.run(
        module_command("prfaas", *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # shown only after a failure
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it printed no reason"]
        raise InputError(f"prfaas {arguments[0]} failed: {why[0]}")
