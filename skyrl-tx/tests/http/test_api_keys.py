"""API keys: callers that are let in."""

import pytest
from starlette.datastructures import Headers

from tx.errors import ConfigError
from tx.tinker.config import EngineConfig
from tx.tinker.http.api_keys import ApiKeys, extract_key, read_api_keys


def config(**settings) -> EngineConfig:
    return EngineConfig(base_model="tiny", **settings)


def test_api_key_belongs_to_tenant_and_unknown_key_to_none():
    keys = ApiKeys([("anna", "tml-anna-key"), ("bela", "tml-bela-key"), ("anna", "tml-anna-second")])
    assert keys.find_holder("tml-anna-key") == ("anna", False)
    assert keys.find_holder("tml-anna-second") == ("anna", False)
    assert keys.find_holder("tml-bela-key") == ("bela", False)
    assert keys.find_holder("tml-anna-ke") is None
    assert keys.find_holder("tml-änna-key") is None
    assert keys.find_holder("") is None


def test_api_key_is_found_in_each_supported_header():
    for headers in (
        {"x-api-key": "tml-anna-key"},
        {"authorization": "Bearer tml-anna-key"},
    ):
        assert extract_key(Headers(headers)) == "tml-anna-key"
    for headers in ({}, {"authorization": "Digest x"}):
        assert extract_key(Headers(headers)) == ""


def test_api_keys_file_allows_comments_and_environment_holds_pairs(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nanna   tml-anna-key\nbela\ttml-bela-key\n")
    assert read_api_keys(config(api_keys_file=file), {}).find_holder("tml-bela-key") == ("bela", False)
    keys = read_api_keys(config(), {"TX_API_KEYS": "anna=tml-anna=key, bela=tml-bela-key"})
    assert keys.find_holder("tml-anna=key") == ("anna", False)
    assert keys.find_holder("tml-bela-key") == ("bela", False)


def test_api_key_may_have_admin_role(tmp_path):
    file = tmp_path / "keys"
    file.write_text("anna tml-anna-key\noperator tml-operator-key admin\nanna tml-anna-too admin\n")
    text = "anna=tml-anna-key,operator:admin=tml-operator-key,anna:admin=tml-anna-too"
    of_file, of_text = read_api_keys(config(api_keys_file=file), {}), read_api_keys(config(), {"TX_API_KEYS": text})
    for keys in (of_file, of_text):
        assert keys.find_holder("tml-anna-key") == ("anna", False)
        assert keys.find_holder("tml-anna-too") == ("anna", True)
        assert keys.find_holder("tml-operator-key") == ("operator", True)
        assert keys.find_holder("tml-other-key") is None


@pytest.mark.parametrize("text", ["anna:root=tml-anna-key", "anna:=tml-anna-key", "anna:admin:x=tml-anna-key"])
def test_another_role_is_refused(text):
    with pytest.raises(ConfigError, match="anna"):
        read_api_keys(config(), {"TX_API_KEYS": text})


@pytest.mark.parametrize(
    "lines, says",
    [
        ("anna", "line 1"),
        ("anna tml-a b", "line 1"),
        ("anna tml-anna-key administrator", "NAME KEY admin"),
        ("anna tml-anna-key\nanna tml-anna-key admin", "remove one of them"),
        ("an/na tml-anna-key", "name of an API key"),
        ("anna short", "8 or more"),
        ("anna tml-same-key\nbela tml-same-key", "same API key"),
        ("# nothing", "has no keys"),
    ],
)
def test_api_keys_file_error_names_line(tmp_path, lines, says):
    file = tmp_path / "keys"
    file.write_text(lines)
    with pytest.raises(ConfigError, match=says):
        read_api_keys(config(api_keys_file=file), {})


def test_api_key_error_text_never_shows_key(tmp_path):
    for text in ("tml-forgot-the-name", "anna=tml-secret key"):
        with pytest.raises(ConfigError) as error:
            read_api_keys(config(), {"TX_API_KEYS": text})
        assert "tml-" not in str(error.value)


def test_missing_api_keys_file_is_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_api_keys(config(api_keys_file=tmp_path / "nowhere"), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org", ""])
def test_server_without_keys_stays_on_loopback(host):
    with pytest.raises(ConfigError, match="--api-keys-file"):
        read_api_keys(config(host=host), {})
    assert read_api_keys(config(host=host), {"TX_API_KEYS": "anna=tml-anna-key"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_keys(host):
    assert not read_api_keys(config(host=host), {})
