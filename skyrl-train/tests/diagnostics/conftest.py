"""Helpers of these tests can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add this folder
