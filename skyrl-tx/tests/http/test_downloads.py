"""Signed addresses of checkpoints."""

import dataclasses
import stat
from urllib.parse import parse_qs, urlsplit

import pytest

from tx.errors import RequestError
from tx.tinker.http.downloads import Download, Downloads
from tx.tinker.types import TinkerPath

PATH = TinkerPath("session_ab:train:0", "sampler_weights", "step-1.5")


@pytest.fixture
def signer() -> Downloads:
    return Downloads(b"\1" * 32)


def query_of(address: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}


def test_download_url_contains_all_signed_fields(signer):
    address = signer.build_url("http://127.0.0.1:8000/", signer.of("anna", PATH))
    query = query_of(address)
    assert urlsplit(address).path == "/api/v1/downloads/session_ab%3Atrain%3A0/sampler_weights/step-1.5"
    assert set(query) == {"tenant", "expires", "signature"}
    signer.check(Download("anna", PATH, int(query["expires"])), query["signature"])


@pytest.mark.parametrize(
    "change",
    [{"tenant": "bela"}, {"path": PATH._replace(name="other")}, {"file": "adapter_config.json"}, {"expires": 2**40}],
)
def test_changed_foreign_or_expired_download_url_is_refused(signer, change):
    download = signer.of("anna", PATH)
    signature = query_of(signer.build_url("http://x", download))["signature"]
    changed, old = dataclasses.replace(download, **change), dataclasses.replace(download, expires=1)
    refused_as(403, "not issued by this server", signer, changed, signature)
    refused_as(410, "expired", signer, old, query_of(signer.build_url("http://x", old))["signature"])
    for made_up in ("", "é", "0" * 64):
        refused_as(403, "not issued by this server", signer, download, made_up)


def refused_as(status, says, signer, download, signature):
    with pytest.raises(RequestError, match=says) as error:
        signer.check(download, signature)
    assert error.value.status == status


def test_download_secret_survives_restart_and_is_private_to_owner(tmp_path):
    first = Downloads.load_or_create(tmp_path / "state")
    download = first.of("anna", PATH)
    signature = query_of(first.build_url("http://x", download))["signature"]
    Downloads.load_or_create(tmp_path / "state").check(download, signature)
    (secret,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
