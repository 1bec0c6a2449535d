import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from skyrl_gym.chat.tool_calls import parse_tool_calls
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.error import InfraError
from skyrl_gym.tools import CalculatorToolGroup

pytest.importorskip("mcp")
from skyrl_gym.tools.mcp import MCPToolGroup

from .scripted_server import unused_url

SERVER = '''
import os, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
calls = 0

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b

@server.tool(name="stock.count")
def stock(item: str) -> list[str]:
    """How many there are."""
    if item == "gold":
        raise ToolError("we have no gold")
    return [f"3 {item}", "of them good"]

@server.tool()
def count() -> int:
    """How often this was called."""
    global calls
    calls += 1
    return calls

@server.tool()
def setting() -> str:
    return os.environ.get("SHOP_SETTING", "none") + " " + str(os.getpid())

@server.tool()
def picture() -> Image:
    return Image(data=b"12345678", format="png")

@server.tool()
def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "done"

@server.tool()
def crash() -> str:
    print("out of coffee", file=sys.stderr, flush=True)
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    script = tmp_path_factory.mktemp("server") / "shop.py"
    script.write_text(SERVER)
    return [sys.executable, str(script)]


@pytest.fixture(scope="module")
def shop(command):
    group = MCPToolGroup(command, env={"SHOP_SETTING": "open"}, timeout=20)
    yield group
    group.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def pid_of(group: MCPToolGroup) -> int:
    return int(group.call("setting", {}).split()[1])


def test_server_tools_become_group_tools(shop):
    assert shop.get_tool_names() == ["add", "count", "crash", "picture", "setting", "stock_count", "wait"]
    schemas = {schema["function"]["name"]: schema["function"] for schema in shop.schemas()}
    assert schemas["add"]["description"] == "Adds two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a"]
    assert schemas["add"]["parameters"]["properties"]["b"]["default"] == 1
    json.dumps(shop.schemas())


@pytest.mark.parametrize(
    "name, arguments, answer",
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("add", {"a": "2"}, "3"),  # text, from a format that knows only text
        ("add", {"": "2"}, "3"),
        ("stock_count", {"item": "nails"}, "3 nails\nof them good"),
        ("picture", {}, "[image: image/png, 9 bytes]"),
        ("add", {"a": "x"}, "Error in add: "),
        ("add", {}, "Field required"),
        ("stock_count", {"item": "gold"}, "Error in stock_count: Error executing tool stock.count: we have no gold"),
        ("stock", {}, "Error: there is no tool 'stock'; did you mean stock_count?"),
        ("add", "2", "the arguments must be an object"),
    ],
)
def test_call_returns_text(shop, name, arguments, answer):
    assert answer in shop.call(name, arguments)


def test_environment_and_model_can_call_mcp_tools(shop):
    env = BaseTextEnv()
    env.init_tool_groups([shop, CalculatorToolGroup()])
    assert env._execute_tool(shop.name, "add", [2, 3]) == "5"
    [call] = parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>', "hermes")
    assert shop.call(call.name, call.arguments) == "2"  # type: ignore[union-attr]


def test_server_gets_environment_keeps_state_and_is_thread_safe(shop):
    assert shop.call("setting", {}).startswith("open ")
    first = int(shop.call("count", {}))
    assert int(shop.call("count", {})) == first + 1
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda n: shop.call("add", {"a": n, "b": n}), range(64))) == [
            str(2 * n) for n in range(64)
        ]


@pytest.mark.slow
def test_prefix_distinguishes_servers(command):
    left, right = (closing(MCPToolGroup(command, prefix=prefix)) for prefix in ("left_", "right_"))
    with left as one, right as other:
        BaseTextEnv().init_tool_groups([one, other])
        assert other.call("right_add", {"a": 1}) == "2"
        with pytest.raises(ValueError, match="left_add"):
            BaseTextEnv().init_tool_groups([one, one])


def test_slow_tool_is_reported_to_model_and_server_survives(command):
    with closing(MCPToolGroup(command, timeout=1)) as group:
        assert group.call("wait", {"seconds": 5}) == "Error in wait: no answer within 1 seconds"
        assert group.call("add", {"a": 1}) == "2"


def test_hanging_server_raises_infra_error(command, monkeypatch):
    monkeypatch.setattr("skyrl_gym.tools.mcp.PROBE_SECONDS", 0.5)
    group = MCPToolGroup(command, timeout=1)
    pid = pid_of(group)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(InfraError, match="1 seconds"):
        group.call("add", {"a": 1})
    assert not is_alive(pid)
    group.close()


def test_crashed_server_error_has_log_tail_and_server_restarts(command):
    with closing(MCPToolGroup(command, max_restarts=1)) as group:
        group.call("count", {})
        with pytest.raises(InfraError, match=r"(?s)shop\.py .*out of coffee"):
            group.call("crash", {})
        assert group.call("count", {}) == "1", "it was started anew"
        for _ in range(2):  # once, and one restart
            with pytest.raises(InfraError, match="out of coffee"):
                group.call("crash", {})
        with pytest.raises(InfraError, match="crashed 2 times"):
            group.call("add", {"a": 1})


def test_close_stops_server(command):
    group = MCPToolGroup(command)
    pid = pid_of(group)
    before = threading.active_count()
    group.close()
    group.close()
    assert not is_alive(pid) and threading.active_count() < before
    with pytest.raises(InfraError, match="the group is closed"):
        group.call("add", {"a": 1})


@pytest.mark.slow
def test_unclosed_server_exits_with_program(command):
    code = f"from skyrl_gym.tools import MCPToolGroup; g = MCPToolGroup({command!r}); print(g.call('setting', {{}}))"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not is_alive(int(ran.stdout.split()[1]))


@pytest.mark.parametrize(
    "program, seconds, text",
    [
        (["/nonexistent/server"], 60, "cannot be started: .*No such file"),
        (
            [sys.executable, "-c", "import sys; sys.exit('no configuration')"],
            60,
            "(?s)cannot be started.*no configuration",
        ),
        ([sys.executable, "-c", "import time; time.sleep(600)"], 1, "did not start within 1 seconds"),
    ],
)
def test_unstartable_server_raises_infra_error(program, seconds, text):
    before = threading.active_count()
    with pytest.raises(InfraError, match=text):
        MCPToolGroup(program, start_timeout=seconds)
    assert threading.active_count() == before


def test_exactly_one_transport_is_required():
    with pytest.raises(ValueError, match="either command or url"):
        MCPToolGroup()
    with pytest.raises(ValueError, match="either command or url"):
        MCPToolGroup(["x"], url="http://127.0.0.1:1")


def test_http_server(command):
    port = urlsplit(unused_url()).port
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(InfraError, match="cannot be started"):
        MCPToolGroup(url=url, start_timeout=5)
    server = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_listening(port)
        group = MCPToolGroup(url=url, timeout=10)
        assert group.call("add", {"a": 2, "b": 2}) == "4"
        assert "we have no gold" in group.call("stock_count", {"item": "gold"})
        server.kill()
        server.wait(10)
        with pytest.raises(InfraError, match=f"MCP server {url}"):
            group.call("add", {"a": 2})
        group.close()
    finally:
        server.kill()
        server.wait(10)


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")
