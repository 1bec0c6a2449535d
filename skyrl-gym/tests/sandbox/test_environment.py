"""Variables of commands, past the shell that unpacks them."""

import json
import shutil
import subprocess
import sys

import pytest

from skyrl_gym.sandbox.environment import carried

NAMES = """
UID EUID PPID GROUPS BASHOPTS SHELLOPTS BASH_VERSINFO BASH_VERSION BASHPID BASH_ARGV0 FUNCNAME DIRSTACK
HISTCMD SHLVL RANDOM SRANDOM SECONDS EPOCHSECONDS EPOCHREALTIME LINENO OPTIND BASH_XTRACEFD BASH_COMPAT
GLOBIGNORE LC_ALL LC_CTYPE LANG LANGUAGE IFS PS4 ENV BASH_ENV PWD OLDPWD HOME TMOUT POSIXLY_CORRECT CDPATH _
MAILCHECK OPTARG OPTERR HOSTNAME COLUMNS LD_LIBRARY_PATH PYTHONPATH KEY
"""


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_every_variable_name_reaches_command_in_every_shell(shell):
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    values = {name: f"no-such {name}" for name in NAMES.split()}
    carriers, command = carried(values, [sys.executable, "-I", "-S", "-c", program])
    environment = {name: value.decode() for name, value in carriers.items()} | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, executable=path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    assert {name: seen.get(name) for name in NAMES.split()} == values
