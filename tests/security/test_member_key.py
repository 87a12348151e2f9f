"""The member key: a kvd answers no request and gives no grant without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prfaas.contracts.kvd_api import OpenTransfer, PullPrefix
from prfaas.errors import InputError
from prfaas.security.shared_key import SharedKey, bearer, new_challenge
from tests.kvd.hosts import COMPAT, begun, fill, kvd, names, prompt_of
from tests.secret_files import write_secret

KEY = "a-key-that-is-hard-to-guess"
PROMPT = prompt_of(40)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("another-key-of-that-sort"),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer \xff"},
    ],
)
def test_a_request_without_the_key_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    with kvd(tmp_path, member_key=SharedKey([KEY])) as host, host.engine():
        asked = OpenTransfer(tuple(names(PROMPT)), 40, COMPAT)
        status, body = host.post("/v1/open", asked, headers)
        assert (status, json.loads(body)["code"]) == (401, "unauthorized")
        for path in ("/v1/stats", "/v1/events", "/v1/role", "/v1/no-such-path", "/metrics"):
            assert host.get(path, headers)[0] == 401
        assert host.get("/health", headers)[0] == 200
        occupancy = json.loads(host.get("/v1/stats", bearer(KEY))[1])["pool"]["occupancy"]
        assert occupancy["leases"] == 0
        assert host.post("/v1/open", asked, bearer(KEY))[0] == 200


def test_the_metrics_key_opens_the_metrics_only(tmp_path: Path) -> None:
    metrics = SharedKey(["a-key-for-prometheus"])
    with kvd(tmp_path, member_key=SharedKey([KEY]), metrics_key=metrics) as host, host.engine():
        given = bearer("a-key-for-prometheus")
        assert host.get("/metrics", given)[0] == 200
        for path in ("/v1/stats", "/v1/events", "/v1/role"):
            assert host.get(path, given)[0] == 401


@pytest.mark.parametrize("source_key", [KEY, "another-key-of-that-sort"])
def test_kvds_send_the_key_to_each_other(tmp_path: Path, source_key: str) -> None:
    source, target = SharedKey([source_key]), SharedKey([KEY])
    with (
        kvd(tmp_path, name="p", member_key=source) as here,
        kvd(tmp_path, name="d", member_key=target) as there,
    ):
        with here.engine() as prefill, there.engine():
            lease = begun(prefill.begin(names(PROMPT), 40))
            fill(lease, PROMPT)
            lease.commit()
            asked = PullPrefix(here.url, tuple(names(PROMPT)))
            status, body = there.post("/v1/pull", asked, bearer(KEY))
            if source_key == KEY:
                assert (status, json.loads(body)["tokens"]) == (200, 40)
            else:
                assert status == 502 and "401" in json.loads(body)["message"]


def test_a_key_file_has_keys_that_cannot_be_guessed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_secret(file, f"{KEY}\n\n  {KEY}-2 \n")
    key = SharedKey.read(file)
    assert key.sent == KEY
    assert key.accepts(f"Bearer {KEY}") and key.accepts(f"bearer {KEY}-2")
    assert not key.accepts(f"Bearer {KEY}-3") and not key.accepts(None)
    for text in ("", "short", "two words of one key", f"{KEY}\nshort", "not-ascii-ключ-ключ"):
        write_secret(file, text)
        with pytest.raises(InputError, match="does not hold a key"):
            SharedKey.read(file)
        with pytest.raises(InputError, match="does not hold a key"):
            key.reload()
    assert key.sent == KEY, "the old key stays in use"
    with pytest.raises(InputError, match="no such file"):
        SharedKey.read(tmp_path / "nowhere")


def test_a_key_is_replaced_in_three_steps(tmp_path: Path) -> None:
    """Whichever of two processes reads its file first, each accepts what the other sends."""
    old, new = "the-old-key-of-members", "the-new-key-of-members"
    file = tmp_path / "key"
    write_secret(file, old)
    early, late = SharedKey.read(file), SharedKey.read(file)
    for step in (f"{old}\n{new}", f"{new}\n{old}", new):
        write_secret(file, step)
        early.reload()
        assert late.accepts(f"Bearer {early.sent}") and early.accepts(f"Bearer {late.sent}")
        late.reload()
        assert late.accepts(f"Bearer {early.sent}") and early.accepts(f"Bearer {late.sent}")
    assert not early.accepts(f"Bearer {old}")


def test_a_proof_holds_for_one_challenge_one_url_and_one_key() -> None:
    key, other = (
        SharedKey([KEY, "another-key-of-that-sort"]),
        SharedKey(["a-third-key-of-that-sort"]),
    )
    challenge, url = new_challenge(), "http://kv1:7401"
    proofs = key.prove(challenge, url)
    assert SharedKey(["another-key-of-that-sort"]).verifies(proofs, challenge, url)
    assert not other.verifies(proofs, challenge, url)
    assert not key.verifies(proofs, new_challenge(), url)
    assert not key.verifies(proofs, challenge, "http://evil:7401")
    assert not key.verifies(["", "\udcff", "é"], challenge, url)
    assert KEY not in "".join(proofs)
