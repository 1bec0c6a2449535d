"""Import of transformers without packages that language models have no use for."""

import sys
from typing import Any


def leave_out_unused_packages() -> None:
    """Let transformers take scikit-learn and scipy for absent in this process. Call it before models are imported.

    Where they are installed, transformers imports them (with pandas: a second of processor time) for one form of
    assisted generation and for losses of object detection. Whoever else imports them gets them. It asks for a package
    once a process and notes the answer; should another release not do so, this changes nothing.
    """
    from transformers.utils import import_utils

    for package in ("sklearn", "scipy"):
        is_available: Any = getattr(import_utils, f"is_{package}_available", None)
        if package not in sys.modules and hasattr(is_available, "cache_clear"):
            is_available.cache_clear()  # (of scipy it asked while it was imported)
            sys.modules[package] = None  # type: ignore[assignment]  Python's sign for one that shall not be found
            try:
                is_available()
            finally:
                del sys.modules[package]
