"""Serve an environment of skyrl_gym to OpenEnv clients.

python -m skyrl_gym.hubs.openenv --env gsm8k --data rows.jsonl --port 8000
"""

import argparse
import json
from pathlib import Path

from skyrl_gym.error import Error
from skyrl_gym.eval.rows import read_tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_gym.hubs.openenv", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--env", required=True, help="id of the environment, or module:Class")
    parser.add_argument(
        "--data", type=Path, help="dataset rows: .parquet, .jsonl, .json (default: the environment's examples)"
    )
    parser.add_argument("--env-config", type=json.loads, default={}, help="settings of the environment, as JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-sessions", type=int, default=64, help="concurrent episodes")
    arguments = parser.parse_args()
    try:
        rows, _ = read_tasks(arguments.env, arguments.data)
    except (Error, FileNotFoundError) as mistake:
        parser.error(str(mistake))
    try:
        import uvicorn

        from skyrl_gym.hubs.openenv.server import make_app
    except ImportError as missing:
        parser.error(f"serving needs OpenEnv ({missing}): pip install openenv==0.10.0")
    app = make_app(arguments.env, rows, arguments.env_config, arguments.max_sessions)
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
