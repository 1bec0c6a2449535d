"""`python -m ....guard OWNER COMMAND`: runs a command, and ends it with all that it started once the process OWNER is
gone, however it went. The guard leads a process group, and is in it all alone with the command.
"""

import os
import signal
import subprocess
import sys
import threading
import time

_INTERVAL_SECONDS = 0.5


def main() -> int:
    owner = int(sys.argv[1])
    threading.Thread(target=_wait_for_end_of, args=(owner,), daemon=True).start()
    return subprocess.run(sys.argv[2:], check=False).returncode


def _wait_for_end_of(owner: int) -> None:
    while os.getppid() == owner:  # orphans get another parent
        time.sleep(_INTERVAL_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
