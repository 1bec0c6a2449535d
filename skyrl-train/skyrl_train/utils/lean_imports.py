"""Import of transformers without packages that language models do not need."""

import sys
from typing import Any


def hide_unused_packages() -> None:
    """Make transformers treat scikit-learn and scipy as missing in this process. Call it before models are imported.

    If installed, transformers imports them (with pandas: a second of processor time) for a form of assisted generation
    and for losses of object detection. Other importers still get them. transformers checks for a package once per
    process and caches the result; if another release does not, this has no effect.
    """
    from transformers.utils import import_utils

    for package in ("sklearn", "scipy"):
        is_available: Any = getattr(import_utils, f"is_{package}_available", None)
        if package not in sys.modules and hasattr(is_available, "cache_clear"):
            is_available.cache_clear()  # (scipy was checked during its import)
            sys.modules[package] = None  # type: ignore[assignment]  Python's sign for one that shall not be found
            try:
                is_available()
            finally:
                del sys.modules[package]
