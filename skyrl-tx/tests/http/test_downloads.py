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


def test_an_address_says_everything_that_it_stands_for(signer):
    url = urlsplit(signer.address("http://127.0.0.1:8000/", signer.of("anna", PATH)))
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    assert url.path == "/api/v1/downloads/session_ab%3Atrain%3A0/sampler_weights/step-1.5"
    assert set(query) == {"tenant", "expires", "signature"}
    signer.check(Download("anna", PATH, int(query["expires"])), query["signature"])


@pytest.mark.parametrize(
    "change",
    [{"tenant": "bela"}, {"path": PATH._replace(name="other")}, {"file": "adapter_config.json"}, {"expires": 2**40}],
)
def test_an_address_that_was_changed_is_refused(signer, change):
    download = signer.of("anna", PATH)
    signature = parse_qs(urlsplit(signer.address("http://x", download)).query)["signature"][0]
    with pytest.raises(RequestError, match="not one of this server's") as error:
        signer.check(dataclasses.replace(download, **change), signature)
    assert error.value.status == 403


def test_an_address_that_is_too_old_is_gone(signer):
    old = dataclasses.replace(signer.of("anna", PATH), expires=1)
    signature = parse_qs(urlsplit(signer.address("http://x", old)).query)["signature"][0]
    with pytest.raises(RequestError, match="expired") as error:
        signer.check(old, signature)
    assert error.value.status == 410


@pytest.mark.parametrize("signature", ["", "é", "0" * 64])
def test_a_made_up_signature_is_refused(signer, signature):
    with pytest.raises(RequestError):
        signer.check(signer.of("anna", PATH), signature)


def test_the_secret_outlives_the_server_and_is_its_owners_alone(tmp_path):
    first = Downloads.with_secret_in(tmp_path / "state")
    download = first.of("anna", PATH)
    signature = parse_qs(urlsplit(first.address("http://x", download)).query)["signature"][0]
    Downloads.with_secret_in(tmp_path / "state").check(download, signature)
    (secret,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
