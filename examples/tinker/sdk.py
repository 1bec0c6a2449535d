"""Common parts of the examples: command-line options, and clients for any version of the SDK."""

import argparse
import os
from typing import Any


def options(description: str, *, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """A parser with the options that every example has.

    Args:
        steps, learning_rate: defaults, good for `tiny_model.py`
    """
    os.environ.setdefault("TINKER_API_KEY", "tml-local")  # a server on loopback without keys takes any
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny", help="a name that the server serves")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def ready(client: Any) -> Any:
    """The client itself: today's SDK gives a future of it, earlier ones gave the client."""
    return client.result() if hasattr(client, "result") else client
