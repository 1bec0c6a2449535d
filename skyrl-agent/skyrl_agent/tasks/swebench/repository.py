"""The git repository of a software task: made ready, its changes taken out as a patch, a patch put in.

Commands run in the runtime's working directory, which is the repository.
"""

import shlex
from dataclasses import replace

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Runtime
from skyrl_agent.tasks.swebench.patches import remove_binary

SECONDS = 600.0
MAX_PATCH_BYTES = 16 << 20
BASE = "refs/agent/base"
"""Git reference that the agent's changes are compared with, whatever it commits."""
HIDDEN = ("r2e_tests", "/r2e_tests", "/root/r2e_tests", "run_tests.sh", "/root/run_tests.sh")
"""Paths of the grading tests in R2E-Gym's images."""
GIT = """
set -e
git() {{ command git -c safe.directory='*' -c user.name=agent -c user.email=agent@localhost -c core.pager=cat "$@"; }}
{}
"""

CLEAN = "git reset --hard -q"
CHECKOUT = "git checkout -q {0} || (git fetch -q && git checkout -q {0})"
FORGET = f"""
for remote in $(git remote); do git remote remove "$remote"; done
printf '%s\\n' .venv/ __pycache__/ '*.pyc' >> "$(git rev-parse --git-path info/exclude)"
git add -A
git commit -q --no-verify --allow-empty -m base
git update-ref {BASE} HEAD
"""
TAKE = f"""
find . -mindepth 2 -name .git -type d -prune -exec rm -rf {{}} +
git add -A
git diff --cached --no-color --no-ext-diff {BASE}
"""
APPLY = """
folder="$(mktemp -d)"
cat > "$folder/it.diff"
git apply --whitespace=nowarn "$folder/it.diff" || patch --batch --fuzz=5 -p1 -i "$folder/it.diff"
"""


async def run(runtime: Runtime, script: str, stdin: str = "") -> str:
    """Run a shell script that may use `git` and return its standard output. Raises InfraError if it fails."""
    limits = replace(runtime.spec.limits, wall_seconds=SECONDS, output_bytes=MAX_PATCH_BYTES)
    done = await runtime.exec(GIT.format(script), stdin=stdin, limits=limits)
    if not done.ok:
        message = (done.stderr or done.stdout).strip()[-500:]
        raise InfraError(f"{script.strip()!r} in {runtime.workdir}: {done.outcome}, {message}")
    return done.stdout


async def prepare(runtime: Runtime, *, checkout: str | None = None, clean: bool = True) -> None:
    """Reset the repository to its initial state and record that state.

    Args:
        checkout: branch to check out first.
        clean: discard uncommitted changes.
    """
    steps = [CLEAN] * clean + [CHECKOUT.format(checkout)] * (checkout is not None) + [FORGET]
    await run(runtime, "\n".join(steps))


async def remove_tests(runtime: Runtime) -> None:
    """Remove the grading tests; the runtime that evaluates has its own."""
    await runtime.exec(["rm", "-rf", "--", *HIDDEN])


async def get_patch(runtime: Runtime) -> str:
    """Return the difference from the first state, without binary files; empty if the agent broke the repository."""
    try:
        return remove_binary(await run(runtime, TAKE))
    except InfraError:
        if (await runtime.exec(["true"])).ok:  # the runtime works, so the agent broke .git
            return ""
        raise


async def apply_patch(runtime: Runtime, patch: str) -> None:
    """Apply a patch by git, else by `patch` with some tolerance.

    Raises:
        InfraError: both fail. A patch that git wrote in the same image applies, so the image must differ.
    """
    await run(runtime, APPLY, stdin=patch)


async def restore(runtime: Runtime, commit: str, paths: list[str]) -> None:
    """Restore files from a commit; files missing in it are removed."""
    quoted = " ".join(map(shlex.quote, paths))
    await run(runtime, f'for path in {quoted}; do git checkout -q {commit} -- "$path" || rm -rf "$path"; done')
