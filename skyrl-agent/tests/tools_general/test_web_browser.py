"""The browser tool against pages, summarizers and a reader service on the loopback interface."""

import json

import pytest

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.tools import make_tool
from skyrl_agent.tools.web.public_addresses import is_public
from skyrl_agent.tools.web.readers import DirectReader, JinaReader, PageError, PageRefused
from skyrl_agent.tools.web.summary import ChatSummarizer, summarize_page

from .agent_web_server import completion, context_of, unused_url, web_server

PAGE = "<html><head><title>Fish</title></head><body><p>The thornfish is <b>green</b>.</p></body></html>"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("WEB_SUMMARY_API_BASE", "WEB_SUMMARY_MODEL", "WEB_BLOCKLIST_DOMAINS", "WEBPAGE_CACHE_FILE"):
        monkeypatch.delenv(name, raising=False)


async def browse(url, goal="colour", context=None, **settings):
    tool = make_tool("web_browser", {"allow_private": True, "timeout": 5.0, **settings})
    try:
        return await tool.call(context or context_of(), {"url": url, "goal": goal})
    finally:
        await tool.close()


async def test_page_without_summarizer_is_returned_and_cached(tmp_path):
    with web_server(lambda asked: (200, PAGE)) as pages:
        outputs = [await browse(f"{pages.url}/a", cache_file=str(tmp_path / "c")) for _ in range(2)]
    assert [output.text for output in outputs] == [f"{pages.url}/a\nFish\n\nThe thornfish is green."] * 2
    assert len(pages.asked) == 1


async def test_pages_are_summarized_for_goal_by_model(tmp_path):
    said = json.dumps({"rational": "r", "evidence": "thornfish is green", "summary": "green"})
    with (
        web_server(lambda asked: (200, PAGE)) as pages,
        web_server(lambda asked: (200, completion(f"Sure: ```json\n{said}\n```"))) as model,
    ):
        output = await browse(
            f'["{pages.url}/b", "{pages.url}/c"]',
            goal="Which {text}?",
            summary_url=model.url,
            summary_model="m",
            cache_file=str(tmp_path / "c"),
        )
    assert output.text.count("Evidence: thornfish is green\nSummary: green") == 2
    body = model.asked[0].body
    assert model.asked[0].path == "/v1/chat/completions" and body["model"] == "m" and body["user"] == "t1"
    asked = body["messages"][0]["content"]
    assert "Goal: Which {text}?" in asked and "The thornfish is green." in asked


async def test_agent_model_summarizes_without_configured_model(tmp_path):
    async def ask(messages):
        return f"I read {len(messages[0]['content'])} characters"

    with web_server(lambda asked: (200, PAGE)) as pages:
        output = await browse(pages.url, context=context_of(ask=ask), cache_file=str(tmp_path / "c"))
    assert "I read " in output.text


async def test_page_too_long_for_model_is_halved(tmp_path):
    async def ask(messages):
        if len(messages[0]["content"]) > 4000:
            raise ValueError("the prompt has 4001 tokens")
        return "read"

    with web_server(lambda asked: (200, f"<p>{'word ' * 1600}")) as pages:
        output = await browse(pages.url, context=context_of(ask=ask), cache_file=str(tmp_path / "c"))
    assert output.text.split("\n\n")[1:] == ["read"] * 3


@pytest.mark.parametrize(
    "answer, said",
    [
        ((404, "gone"), "HTTP 404"),
        ((500, "broken"), "HTTP 500"),
        ((200, b"\x89PNG", {"Content-Type": "image/png"}), "it is image/png"),
        ((302, "", {"Location": "/again"}), "TooManyRedirects"),
        ((302, "", {"Location": "ftp://a.org"}), "UnsupportedProtocol"),
        ((200, "<script>x</script>"), "holds no text"),
        ("drop", "disconnected"),
        ("hang", "did not answer within 0.3 s"),
        ("trickle", "did not answer within 0.3 s"),
    ],
)
async def test_page_errors_reach_model(answer, said, tmp_path):
    with web_server(lambda asked: answer) as pages:
        timeout = 0.3 if "0.3 s" in said else 30.0
        output = await browse(pages.url, timeout=timeout, cache_file=str(tmp_path / "c"))
    assert said in output.text


async def test_failed_page_is_cached_briefly():
    with web_server(lambda asked: (404, "")) as pages:
        tool = make_tool("web_browser", {"allow_private": True})
        for _ in range(3):
            await tool.call(context_of(), {"url": f"{pages.url}/x", "goal": "g"})
        await tool.close()
    assert len(pages.asked) == 1


async def test_private_addresses_are_rejected():
    with web_server(lambda asked: (200, "secret")) as pages:
        port = pages.url.rpartition(":")[2]
        reader = DirectReader(timeout=10.0)
        for host in ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"):
            with pytest.raises(PageRefused, match="not on the public internet"):
                await reader.read(f"http://{host}:{port}/")
        await reader.close()
        output = await browse(pages.url, allow_private=False)
    assert "could not be read: 127.0.0.1 is not on the public internet" in output.text
    assert not pages.asked


async def test_redirect_to_private_address_is_rejected(monkeypatch):
    """The first server counts as public here: what is tested is the second hop."""
    from skyrl_agent.tools.web import public_addresses

    real = public_addresses._resolve_public_address
    with (
        web_server(lambda asked: (200, "secret")) as inside,
        web_server(lambda asked: (302, "", {"Location": inside.url})) as outside,
    ):
        inside_port = int(inside.url.rpartition(":")[2])

        async def found(host, port):
            return await real(host, port) if port == inside_port else "127.0.0.1"

        monkeypatch.setattr(public_addresses, "_resolve_public_address", found)
        reader = DirectReader(timeout=5.0)
        with pytest.raises(PageRefused, match="not on the public internet"):
            await reader.read("http://outside.example:" + outside.url.rpartition(":")[2])
        await reader.close()
    assert outside.asked[0].headers["host"].startswith("outside.example") and not inside.asked


@pytest.mark.parametrize(
    "address, public",
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
    ],
)
def test_public_addresses(address, public):
    assert is_public(address) == public


async def test_blocked_pages_are_not_fetched_through_redirect(tmp_path):
    with web_server(
        lambda asked: (302, "", {"Location": "/secret-answers"}) if asked.path == "/a" else (200, PAGE)
    ) as pages:
        settings = {"blocked_keywords": ["Secret-Answers"], "cache_file": str(tmp_path / "c")}
        assert "This page is blocked" in (await browse(f"{pages.url}/secret-answers", **settings)).text
        assert not pages.asked
        output = await browse(f"{pages.url}/a", **settings)
    assert "blocked" in output.text and "thornfish" not in output.text


async def test_summarizer_outage_is_not_page_error(tmp_path):
    with (
        web_server(lambda asked: (200, PAGE)) as pages,
        web_server(lambda asked: (401, "no")) as model,
        pytest.raises(InfraError, match="401"),
    ):
        await browse(pages.url, summary_url=model.url, summary_model="m", cache_file=str(tmp_path / "c"))


async def test_overlong_chunks_are_halved():
    def answer(asked):
        text = asked.body["messages"][0]["content"].split("-----")[1].strip()
        return (400, "context length") if len(text) > 3000 else (200, completion(f"{len(text)}"))

    with web_server(answer) as model:
        summarizer = ChatSummarizer(model.url, "m")
        found = await summarize_page(summarizer, "x" * 10_000, "g", "u", chunk_chars=8000)
        await summarizer.close()
    assert found.split("\n\n") == ["2000"] * 5


async def test_model_rejecting_every_chunk_is_outage():
    with web_server(lambda asked: (400, "no")) as model:
        summarizer = ChatSummarizer(model.url, "m")
        with pytest.raises(InfraError, match="refuses"):
            await summarize_page(summarizer, "x" * 4000, "g", "u", chunk_chars=4000)
        await summarizer.close()


async def test_empty_elements_are_skipped():
    replies = iter(['{"evidence": "", "summary": "nothing"}', "plain words", '{"evidence": "E", "summary": "S"}'])

    class Said:
        async def summarize(self, text, goal, user):
            return next(replies)

    assert await summarize_page(Said(), "abc", "g", "u", 1) == "plain words\n\nEvidence: E\nSummary: S"


async def test_reader_service_without_key_is_outage():
    answers = {"/https://a.org/good?x=1": (200, "# Markdown"), "/https://a.org/bad": (422, "no such page")}
    with web_server(lambda asked: answers.get(asked.path, (402, "pay"))) as service:
        reader = JinaReader(("k",), url=service.url)
        assert (await reader.read("https://a.org/good?x=1")).text == "# Markdown"
        with pytest.raises(PageError, match="no such page"):
            await reader.read("https://a.org/bad")
        await reader.close()
        without_key = JinaReader(url=service.url)
        with pytest.raises(InfraError, match="402"):
            await without_key.read("https://a.org")
        await without_key.close()
    assert service.asked[0].path == "/https://a.org/good?x=1"
    assert service.asked[0].headers["authorization"] == "Bearer k"


async def test_missing_and_unreachable_addresses_are_reported(tmp_path):
    output = await browse("the page about fish")
    assert output.failed and "give 1 to 5 addresses" in output.text
    output = await browse(unused_url(), cache_file=str(tmp_path / "c"))
    assert "could not be read: ConnectError" in output.text


@pytest.mark.parametrize(
    "settings", [{"reader": "lynx"}, {"summary_url": "http://a.org"}, {"cache_file": "/proc/no/c"}]
)
def test_invalid_settings_are_rejected_at_construction(settings):
    with pytest.raises(ConfigError, match="web_browser"):
        make_tool("web_browser", settings)
