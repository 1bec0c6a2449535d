"""`python -m ....guard OWNER COMMAND`: runs a command, and kills it and its descendants once the process OWNER has
exited for any reason. The guard leads a process group that contains only the command.
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
    while os.getppid() == owner:  # an orphan gets another parent
        time.sleep(_INTERVAL_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
