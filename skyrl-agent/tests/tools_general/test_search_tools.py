"""Search tools against real servers on the loopback interface."""

import pytest

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.tools import make_tool
from skyrl_agent.tools.search_clients import Hit
from skyrl_agent.tools.web_search import SearchEngine, parse_queries

from .agent_web_server import context_of, web_server

SERPER = {"organic": [{"title": "T", "link": "https://a.org/1", "snippet": "About T"}, {"link": "https://b.com/2"}]}
YOUCOM = {
    "results": {
        "web": [{"url": "https://a.org", "title": "A", "snippets": ["one", "two"]}],
        "news": [{"url": "https://n.org", "title": "N", "description": "today"}],
    }
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (
        "LOCAL_SEARCH_URL",
        "GOOGLE_SEARCH_KEY",
        "YDC_API_KEY",
        "SEARCH_BLOCKLIST_DOMAINS",
        "FAISS_SEARCH_URL",
    ):
        monkeypatch.delenv(name, raising=False)


async def call(tool, **arguments):
    try:
        return await tool.call(context_of(), arguments)
    finally:
        await tool.close()


@pytest.fixture(scope="module")
def retriever():
    pytest.importorskip("bm25s", reason="needs skyrl-gym[retrieval]")
    from skyrl_gym.tools.retrieval import RetrievalServer

    documents = [
        {"id": "p", "title": "Paris", "text": "Paris is the capital of France."},
        {"id": "r", "title": "Rome", "text": "Rome is the capital of Italy."},
    ]
    with RetrievalServer(documents) as server:
        yield server


async def test_local_search_uses_gym_retriever(retriever, monkeypatch):
    monkeypatch.setenv("LOCAL_SEARCH_URL", retriever.url)
    output = await call(make_tool("local_search", {"topk": 1}), query=" capital of Italy ")
    assert output.text == 'Doc 1(Title: "Rome") Rome is the capital of Italy.'
    assert not output.failed


async def test_faiss_search_truncates_documents(retriever):
    output = await call(make_tool("faiss_search", {"url": retriever.url, "max_document_chars": 8}), query="capital")
    assert sorted(output.text.split("\n")) == ['Doc 1(Title: "Paris") Paris is', 'Doc 2(Title: "Rome") Rome is ']


async def test_empty_search_result_is_reported(retriever):
    output = await call(make_tool("local_search", {"url": retriever.url}), query="zebra")
    assert output.text.startswith("No document was found")


async def test_server_rejections_reach_model(retriever):
    output = await call(make_tool("local_search", {"url": retriever.url}), query="x" * 9000)
    assert output.failed and "9000 characters; 8192 are allowed" in output.text


@pytest.mark.parametrize("answer", [{"result": []}, {"result": [[{"no": 1}]]}, [1], {"other": 1}])
async def test_malformed_retriever_reply_is_infrastructure_failure(answer):
    with web_server(lambda asked: (200, answer)) as server, pytest.raises(InfraError, match="unknown format"):
        await call(make_tool("local_search", {"url": server.url}), query="a")


async def test_google_search_uses_serper(monkeypatch):
    monkeypatch.setenv("GOOGLE_SEARCH_KEY", "k1")
    with web_server(lambda asked: (200, SERPER)) as server:
        tool = make_tool("search_engine", {"url": server.url, "blocked_domains": ["b.com"]})
        output = await call(tool, query='["first  thing", "second"]')
    queries = {asked.body["q"] for asked in server.asked}  # asked at the same time: in any order
    assert queries == {"first thing -site:b.com", "second -site:b.com"}
    assert server.asked[0].headers["x-api-key"] == "k1"
    first, second = output.text.split("\n=======\n")
    assert first == "Results for 'first thing':\n\n1. [T](https://a.org/1)\nAbout T"
    assert "b.com" not in second


async def test_youcom_search():
    with web_server(lambda asked: (200, YOUCOM)) as server:
        output = await call(make_tool("youcom_search_engine", {"url": server.url, "api_key": "k"}), query="q w")
    assert server.asked[0].path == "/?query=q+w&count=10"
    assert "1. [A](https://a.org)\none two\n\n2. [N](https://n.org)\ntoday" in output.text


@pytest.mark.parametrize(
    "name, variable", [("search_engine", "GOOGLE_SEARCH_KEY"), ("youcom_search_engine", "YDC_API_KEY")]
)
def test_missing_key_names_variable_and_setting(name, variable):
    with pytest.raises(ConfigError, match=f"{name} .*{variable}.*`api_key`"):
        make_tool(name)


@pytest.mark.parametrize("settings", [{"url": "no address"}, {"url": "http://a.org", "topk": "many"}])
def test_invalid_settings_are_rejected_at_construction(settings):
    with pytest.raises(ConfigError, match="local_search"):
        make_tool("local_search", settings)


async def test_search_engine_outage_is_not_tool_result():
    with web_server(lambda asked: (401, "wrong key")) as server, pytest.raises(InfraError, match="401"):
        await call(make_tool("search_engine", {"url": server.url, "api_key": "k"}), query="q")


async def test_custom_search_engine():
    class Mine:
        async def search(self, query: str, num: int) -> list[Hit]:
            return [Hit(query.upper(), "https://mine.org", "found")]

        async def close(self) -> None:
            pass

    output = await call(SearchEngine(client=Mine()), query="a")
    assert output.text == "Results for 'a':\n\n1. [A](https://mine.org)\nfound"


@pytest.mark.parametrize(
    "given, queries",
    [
        ("one", ["one"]),
        (["a", "a ", " b\n c"], ["a", "b c"]),
        ('["a", "b"]', ["a", "b"]),
        ('"quoted" words', ['"quoted" words']),
        ("42", ["42"]),
    ],
)
def test_query_formats(given, queries):
    assert parse_queries(given) == queries


@pytest.mark.parametrize("given", ["", [], [" "], list("abcdef")])
def test_query_count_is_validated(given):
    with pytest.raises(ValueError, match="1 to 5 queries"):
        parse_queries(given)
