"""Certificates and keys that are replaced while a service runs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from prfaas.errors import ConnectionLost, InputError
from prfaas.http_client.client import HttpClient, open_client
from prfaas.listening import listen, service_url
from prfaas.security.reload import FileWatch, defer_hangup, reloading
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import SERVICE_NAME, TlsFiles, TlsIdentity, trust_context
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from tests.secret_files import write_secret
from tests.waiting import HANG_S, wait_until

CONNECT_S = 10.0


class Files:
    """The certificate files of one process, which a test replaces."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.files = TlsFiles(*(folder / f"{name}.pem" for name in ("ca", "c", "k", "cc", "ck")))

    def trust(self, *cas: CertificateSet) -> None:
        self.files.ca.write_text("".join(made.ca.read_text() for made in cas))

    def use(self, made: CertificateSet) -> None:
        pairs = {
            made.server: self.files.cert,
            made.server_key: self.files.key,
            made.client: self.files.client_cert,
            made.client_key: self.files.client_key,
        }
        for source, target in pairs.items():
            shutil.copy(source, target)


@pytest.fixture(scope="module")
def cas(tmp_path_factory: pytest.TempPathFactory) -> tuple[CertificateSet, CertificateSet]:
    folder = tmp_path_factory.mktemp("cas")
    return make_certificates(folder / "old"), make_certificates(folder / "new")


@pytest.fixture
def ends(tmp_path: Path, cas: tuple[CertificateSet, CertificateSet]) -> tuple[Files, Files]:
    """A server's files and a client's files, both of the old CA."""
    made = (Files(tmp_path / "server"), Files(tmp_path / "client"))
    for files in made:
        files.trust(cas[0])
        files.use(cas[0])
    return made


@asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[str]:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    listening = listen("127.0.0.1", 0)
    try:
        await web.SockSite(runner, listening, ssl_context=context).start()
        yield service_url(listening, tls=True)
    finally:
        await runner.cleanup()


async def is_served(url: str, tls: TlsIdentity) -> bool:
    """By a new connection."""
    async with open_client(connect_s=CONNECT_S, tls=tls.client) as http:
        return await asks(http, url)


async def asks(http: HttpClient, url: str) -> bool:
    try:
        return await http.request("GET", f"{url}/", timeout_s=HANG_S) == b"hello"
    except ConnectionLost:
        return False


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """The services run on uvloop, whose TLS is its own."""
    with asyncio.Runner(loop_factory=request.param) as made:
        yield made


def test_a_ca_is_replaced_in_three_steps_and_an_open_connection_goes_on(
    runner: asyncio.Runner,
    ends: tuple[Files, Files],
    cas: tuple[CertificateSet, CertificateSet],
    tmp_path: Path,
) -> None:
    old, new = cas
    outdated = Files(tmp_path / "outdated")
    outdated.trust(old, new)
    outdated.use(old)

    async def replace() -> None:
        server, client = TlsIdentity(ends[0].files), TlsIdentity(ends[1].files)
        async with (
            serving(server.member_http()) as url,
            open_client(connect_s=CONNECT_S, tls=client.client) as kept,
        ):
            steps = [
                lambda files: files.trust(old, new),
                lambda files: files.use(new),
                lambda files: files.trust(new),
            ]
            assert await asks(kept, url)
            for step in steps:
                for files, identity in zip(ends, (server, client), strict=True):
                    step(files)
                    identity.reload()
                    assert await is_served(url, client), "between two reloads"
                assert await asks(kept, url), "an open connection goes on"
            # The old CA is not trusted any more, in either direction.
            assert not await is_served(url, TlsIdentity(outdated.files))

    runner.run(replace())


def test_clients_without_certificates_see_the_new_one(
    runner: asyncio.Runner,
    ends: tuple[Files, Files],
    cas: tuple[CertificateSet, CertificateSet],
) -> None:
    async def replace() -> None:
        server = TlsIdentity(ends[0].files)
        async with serving(server.public_http()) as url:
            for made, other in (cas, cas[::-1]):
                ends[0].use(made)
                server.reload()
                async with (
                    open_client(tls=lambda made=made: trust_context(made.ca)) as knows,  # type: ignore[misc]
                    open_client(tls=lambda other=other: trust_context(other.ca)) as not_yet,  # type: ignore[misc]
                ):
                    assert await asks(knows, url) and not await asks(not_yet, url)

    runner.run(replace())


def test_wrong_files_change_nothing(
    ends: tuple[Files, Files], cas: tuple[CertificateSet, CertificateSet]
) -> None:
    files = ends[0].files
    identity = TlsIdentity(files)
    server, client = identity.server(), identity.client()
    shutil.copy(cas[1].server, files.cert)  # of another key
    with pytest.raises(InputError, match="does not belong to the certificate"):
        identity.reload()
    files.cert.unlink()
    with pytest.raises(InputError, match="no such file"):
        identity.reload()
    assert identity.server() is server and identity.client() is client


async def test_a_hangup_reloads_every_part_also_after_one_that_fails() -> None:
    reloaded = asyncio.Event()

    class Broken:
        def files(self) -> list[Path]:
            return []

        def reload(self) -> None:
            raise InputError("no such file")

    class Good:
        def files(self) -> list[Path]:
            return []

        def reload(self) -> None:
            reloaded.set()

    before = signal.getsignal(signal.SIGHUP)
    try:
        # A hang-up while the process starts neither ends it nor is it forgotten.
        defer_hangup()
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(HANG_S), reloading([Broken(), None, Good()]):
            assert reloaded.is_set()
            reloaded.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            await reloaded.wait()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


async def test_a_changed_file_is_read_again_without_a_signal(tmp_path: Path) -> None:
    """As where a Secret is mounted: another folder takes the place of the files."""
    first, second = tmp_path / "..1", tmp_path / "..2"
    for number, folder in enumerate((first, second)):
        folder.mkdir()
        write_secret(folder / "member.key", f"{number}" * 16 + "\n")
    data = tmp_path / "..data"
    data.symlink_to(first.name)
    file = tmp_path / "member.key"
    file.symlink_to("..data/member.key")
    key = SharedKey.read(file)
    before = signal.getsignal(signal.SIGHUP)
    try:
        async with reloading([key], poll_s=0.01):
            other = tmp_path / "..new"
            other.symlink_to(second.name)
            other.replace(data)
            await asyncio.to_thread(wait_until, lambda: key.sent == "1" * 16)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


def test_a_watch_sees_each_change_once(tmp_path: Path) -> None:
    file = tmp_path / "operator.key"
    write_secret(file, "a" * 16)
    watch = FileWatch([SharedKey.read(file)])
    assert watch.has_changed()  # it may have changed since the process has read it
    assert not watch.has_changed()
    file.write_text("b" * 16)
    assert [watch.has_changed(), watch.has_changed()] == [True, False]
    file.unlink()
    assert [watch.has_changed(), watch.has_changed()] == [True, False]


async def test_a_server_may_be_known_by_the_name_of_its_service(tmp_path: Path) -> None:
    """Addresses of pods are in no certificate."""
    made = make_certificates(tmp_path / "made")
    tls = TlsFiles(made.ca, made.server, made.server_key, made.client, made.client_key)
    by_host, by_name = TlsIdentity(tls), TlsIdentity(tls, SERVICE_NAME)

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    listening = listen("127.0.0.2", 0)
    await web.SockSite(runner, listening, ssl_context=by_name.member_http()).start()
    url = service_url(listening, tls=True)
    try:
        async with open_client(tls=by_host.client) as http:
            with pytest.raises(ConnectionLost, match="127.0.0.2"):
                await http.request("GET", f"{url}/", timeout_s=HANG_S)
        for name, answers in ((SERVICE_NAME, True), ("another.name", False)):
            async with open_client(tls=by_name.client, server_name=name) as http:
                if answers:
                    assert await http.request("GET", f"{url}/", timeout_s=HANG_S) == b"hello"
                else:
                    with pytest.raises(ConnectionLost, match="another.name"):
                        await http.request("GET", f"{url}/", timeout_s=HANG_S)
    finally:
        await runner.cleanup()
