"""The search engine inside a runtime: its files are copied there, and the index stays there."""

import hashlib
import json
from functools import cache
from importlib.resources import files

from skyrl_agent.runtimes.base import Limits, Runtime

MAIN = "from engine.cli import main\nraise SystemExit(main())\n"
WRITE = """
import json, os, sys, tempfile
content = json.load(sys.stdin)
folder = os.path.join(tempfile.gettempdir(), content["folder"])
os.makedirs(os.path.join(folder, "engine"), exist_ok=True)
for path, text in content["files"].items():
    with open(os.path.join(folder, path), "w", encoding="utf-8") as file:
        file.write(text)
if content["command"]:
    with open(content["command"], "w", encoding="utf-8") as file:
        file.write('#!/bin/sh\\nexec "%s" -I -S "%s" --cache "%s/index" "$@"\\n' % (sys.executable, folder, folder))
    os.chmod(content["command"], 0o755)
print(folder)
"""
INDEX = "index"


@cache
def read_engine_files() -> dict[str, str]:
    """Return the engine's source files: path -> source."""
    engine = files("skyrl_agent.tools.code_search") / "engine"
    sources = {f"engine/{item.name}": item.read_text() for item in engine.iterdir() if item.name.endswith(".py")}
    return {"__main__.py": MAIN, **dict(sorted(sources.items()))}


async def install_search(runtime: Runtime, command: str | None = None, limits: Limits | None = None) -> str:
    """Copy the search engine into a runtime's folder for temporary files, and return that folder.

    Args:
        command: path of the command `search`, e.g. /usr/local/bin/search; none: nowhere.

    Raises:
        RuntimeError: the files could not be written there.
        InfraError: of the runtime.
    """
    version = hashlib.sha256(json.dumps(read_engine_files()).encode()).hexdigest()[:12]
    content = {"folder": f".agent-code-search-{version}", "files": read_engine_files(), "command": command}
    result = await runtime.exec([runtime.python, "-I", "-c", WRITE], stdin=json.dumps(content), limits=limits)
    if not result.ok:
        raise RuntimeError(f"the search could not be put into the runtime: {result.outcome}, {result.stderr[-500:]}")
    return result.stdout.strip()
