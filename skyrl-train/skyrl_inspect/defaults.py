"""Defaults of all settings, computed by a process that ends: they need the losses' modules, and so torch.

`python -m skyrl_inspect.defaults` prints them as JSON.
"""

import json
import subprocess
import sys
from threading import Thread

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.fingerprint import flatten_settings
from skyrl_train.config.typed import resolve_references

TIMEOUT_SECONDS = 120.0


class Defaults:
    """Defaults by full name; None until they are known."""

    def __init__(self, values: dict[str, object] | None = None):
        self.values = values

    def load(self) -> None:
        """Begin to compute them in the background. Where that fails, they stay unknown."""
        Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        command = [sys.executable, "-m", "skyrl_inspect.defaults"]
        try:
            made = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, check=True)
            self.values = json.loads(made.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return


def get_default_settings() -> dict[str, object]:
    """Return the default of every setting of a training run, with references to other settings resolved."""
    config = SkyRLConfig()
    resolve_references(config)
    return flatten_settings(config)


if __name__ == "__main__":
    print(json.dumps(get_default_settings()))
