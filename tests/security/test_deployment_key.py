"""The deployment key: a kvd answers no request and gives no grant without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prfaas.contracts.kvd_api import OpenTransfer, PullPrefix
from prfaas.errors import InputError
from prfaas.security.deployment_key import bearer, read_deployment_key
from tests.kvd.hosts import COMPAT, begun, fill, kvd, names, prompt_of

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
    with kvd(tmp_path, key=KEY) as host, host.engine():
        asked = OpenTransfer(tuple(names(PROMPT)), 40, COMPAT)
        status, body = host.post("/v1/open", asked, headers)
        assert (status, json.loads(body)["code"]) == (401, "unauthorized")
        for path in ("/v1/stats", "/v1/events", "/v1/role", "/v1/no-such-path"):
            assert host.get(path, headers)[0] == 401
        for path in ("/health", "/metrics"):
            assert host.get(path, headers)[0] == 200
        occupancy = json.loads(host.get("/v1/stats", bearer(KEY))[1])["pool"]["occupancy"]
        assert occupancy["leases"] == 0
        assert host.post("/v1/open", asked, bearer(KEY))[0] == 200


@pytest.mark.parametrize("source_key", [KEY, "another-key-of-that-sort"])
def test_kvds_send_the_key_to_each_other(tmp_path: Path, source_key: str) -> None:
    with kvd(tmp_path, name="p", key=source_key) as here, kvd(tmp_path, name="d", key=KEY) as there:
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


def test_a_key_is_one_line_that_cannot_be_guessed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_deployment_key(file) == KEY
    for text in ("", "short", "two words of one key", f"{KEY}\n{KEY}", "not-ascii-ключ-ключ"):
        file.write_text(text)
        with pytest.raises(InputError, match="does not hold a key"):
            read_deployment_key(file)
    with pytest.raises(InputError, match="no such file"):
        read_deployment_key(tmp_path / "nowhere")
