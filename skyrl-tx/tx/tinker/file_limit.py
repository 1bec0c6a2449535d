"""Limit of open files, sockets included, of this process."""

import resource

MOST = 2**20
"""More is not asked for: where the system sets no bound, some of its tables would."""
FEW = 4096
"""A lower limit is too low for a server: each pending result holds a connection."""


def raise_file_limit() -> int:
    """Raise the limit (`ulimit -n`) to what the system allows this process, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now, allowed = (MOST if each == resource.RLIM_INFINITY else each for each in (soft, hard))
    wanted = min(allowed, MOST)
    if now >= wanted:
        return now
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):  # macOS allows less than it says
        return now
    return wanted
