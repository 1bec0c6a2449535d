"""Addresses, pages as text, blocklists and the cache: no network."""

import sqlite3
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_agent.tools.cache import WebPageCache
from skyrl_agent.tools.web.blocklist import Blocklist
from skyrl_agent.tools.web.html_text import html_to_text
from skyrl_agent.tools.web.urls import list_url_variants, parse_urls


@pytest.mark.parametrize(
    "written, urls",
    [
        ("https://a.org", ["https://a.org/"]),
        (' "https://A.org/Path" ', ["https://a.org/Path"]),
        ("[text](https://a.org/x_(y))", ["https://a.org/x_(y)"]),
        ("<https://a.org/x>.", ["https://a.org/x"]),
        ('["https://a.org", "https://b.org"]', ["https://a.org/", "https://b.org/"]),
        ("['https://a.org', 'https://b.org'", ["https://a.org/", "https://b.org/"]),
        (["https://a.org", "https://a.org/"], ["https://a.org/"]),
        ("See https://a.org/x?q=1#top, and (https://b.org).", ["https://a.org/x?q=1", "https://b.org/"]),
        ("www.a.org/page", ["https://www.a.org/page"]),
        ("`a.org`", ["https://a.org/"]),
        ("https://a.org/ü", ["https://a.org/%C3%BC"]),
        ("no address", []),
        ("", []),
        ("ftp://a.org/x", []),
    ],
)
def test_urls_are_found_in_model_text(written, urls):
    assert parse_urls(written) == urls


@given(st.text(max_size=200))
def test_url_parser_accepts_arbitrary_text(text):
    for url in parse_urls(text):
        assert url.startswith(("http://", "https://"))
        assert list_url_variants(url)


def test_urls_are_found_in_linear_time():
    started = time.monotonic()
    for hostile in ("https://" * 20_000, "a." * 100_000, "(" * 100_000, "https://a" + ")" * 50_000):
        parse_urls(hostile)
    assert time.monotonic() - started < 10


def test_url_variants():
    assert list_url_variants("https://a.org/x?y") == ["https://a.org/x?y", "https://www.a.org/x?y", "http://a.org/x?y"]
    assert list_url_variants("http://www.a.org/") == ["http://www.a.org/", "http://a.org/"]
    assert list_url_variants("http://127.0.0.1:80/") == ["http://127.0.0.1:80/"]


def test_page_is_converted_to_text():
    html = """<!doctype html><html><head><title> The
      Title</title><style>p {}</style></head><body><nav><a href="/home">Home</a></nav>
      <h1>Head</h1><p>One&nbsp;<b>bold</b> &amp; <a href="b.html">link</a>.<br>Next<script>var x = "<p>no</p>";</script>
      <ul><li>first<li>second</ul><table><tr><td>a</td><td>b</td></tr></table></body></html>"""
    assert html_to_text(html, "https://a.org/dir/") == (
        "The Title\n\n[Home](https://a.org/home)\n\n# Head\n\nOne bold & [link](https://a.org/dir/b.html).\nNext\n\n"
        "- first\n- second\n\n| a | b"
    )


@pytest.mark.parametrize(
    "html, text",
    [
        ("plain", "plain"),
        ("", ""),
        ("<head><title>T</title><p>open head", "T\n\nopen head"),
        ("<svg><svg></svg>no</svg>yes", "yes"),
        ("<a href='#x'>here</a> <a href='javascript:y'>there</a>", "here there"),
        ("<a href='http://[bad'>x</a>", "x"),
        ("</p></svg><p>a", "a"),
        ("<title>T</title><h1>T</h1>", "# T"),
    ],
)
def test_malformed_pages_are_converted_to_text(html, text):
    assert html_to_text(html, "https://a.org/") == text


@pytest.mark.parametrize(
    "hostile",
    [
        "<",
        "<a ",
        "<!--",
        "<svg>",
        "</",
        "<![CDATA[",
        "<script>",
        "&#",
        "<a href='x'>",
        "<!",
        "<a '>'",
        "<a x=",
        "&#9999999",
    ],
)
def test_malicious_pages_are_converted_in_time(hostile):
    started = time.monotonic()
    html_to_text(hostile * (200_000 // len(hostile)))
    assert time.monotonic() - started < 30


@given(st.text(alphabet="<>/!-ab ='\"&#;1\n", max_size=80))
def test_random_page_is_converted_to_text(page):
    html_to_text(page, "https://a.org/")


def test_blocklists():
    blocked = Blocklist(["*.example.org", "B.com"], ["leaked"])
    assert blocked.blocks("https://www.example.org/x") and blocked.blocks("http://EXAMPLE.org.")
    assert blocked.blocks("https://b.com") and blocked.blocks("https://c.net", "The LEAKED set")
    assert not blocked.blocks("https://notexample.org/b.com") and not blocked.blocks("https://c.net")
    assert blocked.blocks("http://[broken")


def test_cache_evicts_least_recently_used():
    cache = WebPageCache(max_size=2)
    cache.put("a", "A")
    cache.put("b", "B")
    assert cache.get("a") == "A"
    cache.put("c", "C")
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == ("A", None, "C", 2)
    cache.close()


def test_cache_file_is_shared_and_persistent(tmp_path):
    file = tmp_path / "folder" / "cache"
    one, other = WebPageCache(100, file), WebPageCache(100, file)
    threads = [
        threading.Thread(target=cache.put, args=(f"{i}", f"text {i}")) for i in range(20) for cache in (one, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.put("half \ud800", "of a character \ud800")
    one.close()
    assert [other.get(f"{i}") for i in range(20)] == [f"text {i}" for i in range(20)]
    other.close()
    again = WebPageCache(100, file)
    assert again.get("7") == "text 7"
    again.close()


def test_corrupt_cache_returns_nothing(tmp_path, caplog):
    file = tmp_path / "cache"
    file.write_bytes(b"no database" * 100)
    cache = WebPageCache(10, file)
    cache.put("a", "A")
    assert cache.get("a") is None and "failed" in caplog.text
    cache.close()
    with pytest.raises(sqlite3.Error):
        WebPageCache(10, tmp_path)  # a folder
