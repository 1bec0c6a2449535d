"""Importing costs nothing: no environment variable, no socket, no process, no heavy package."""

import json
import subprocess
import sys

PROGRAM = """
import importlib, json, pkgutil, sys

happened = []
def watch(event, arguments):
    if event in ("socket.__new__", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.mkdir", "sqlite3.connect"):
        happened.append(f"{event} {arguments}")
sys.addaudithook(watch)

import skyrl_agent

ADAPTERS = ("skyrl_agent.integrations.skyrl_train", "skyrl_agent.integrations.tinker")
names = [m.name for m in pkgutil.walk_packages(skyrl_agent.__path__, "skyrl_agent.", onerror=lambda name: None)]
imported = [name for name in names if not name.startswith(ADAPTERS) and not name.endswith("__main__")]
for name in imported:
    importlib.import_module(name)
    if happened:
        sys.exit(f"{name}: {happened}")
heavy = ("torch", "ray", "transformers", "vllm", "skyrl_train", "openai", "datasets", "faiss", "pandas", "playwright")
print(json.dumps({"modules": imported, "heavy": [name for name in heavy if name in sys.modules]}))
"""


def test_importing_every_module_has_no_effect():
    bare = [sys.executable, "-I", "-B", "-c", PROGRAM]
    run = subprocess.run(bare, env={}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert len(told["modules"]) > 50
    assert told["heavy"] == []
