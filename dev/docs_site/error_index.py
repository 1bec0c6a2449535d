"""Index of error messages: collected from the source, grouped by the setting that they name, with the way out."""

import ast
import html
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("skyrl-train/skyrl_train", "skyrl-gym/skyrl_gym", "skyrl-agent/skyrl_agent", "skyrl-tx/tx")
ERROR_FILES = (
    "skyrl-train/skyrl_train/errors.py",
    "skyrl-gym/skyrl_gym/error.py",
    "skyrl-agent/skyrl_agent/errors.py",
    "skyrl-tx/tx/errors.py",
)
RAISING = {"require": "ConfigError"}
"""Functions that raise: name -> class of the error. Their last argument is the text."""
GAP = "…"
"""Stands for a value that is known at run time alone."""
REMEDIES = {
    "SkyRLError": "correct the generator or trainer of your own that the message speaks of; otherwise report it",
    "AgentError": "correct the agent or tool of your own that the message speaks of; otherwise report it",
    "ConfigError": "correct the setting or option that the message names",
    "DataError": "correct the file or row that the message names ([environments](../environments.md) has the columns)",
    "CheckpointError": "free the disk, or continue from an earlier checkpoint ([checkpoints](../checkpoints.md))",
    "WorkerError": "read the end of the process's log in the message, or its file in the run folder's `logs`",
    "WorkerMemoryError": "the message has estimate, measured peak and the smallest change that fits; "
    "`python -m skyrl_train.plan` tries others beforehand",
    "WeightSyncError": "see which tensor differs ([engines](../engines.md#weights)); start the run again, it resumes",
    "UnsupportedByEngine": "use an engine that has it ([engines](../engines.md))",
    "AllRolloutsFailedError": "correct the commonest cause, which the message quotes: environment, tool or engine",
    "NonFiniteUpdateError": "correct what was not finite ([numerical checks](../algorithms.md#numerical-checks))",
    "RolloutGapError": "find what differs between engine and trainer "
    "([numerical checks](../algorithms.md#numerical-checks)), or raise trainer.algorithm.max_rollout_gap",
    "RolloutError": "one trajectory failed, the batch continues; the run's report has the failures of each step",
    "Error": "correct the argument that the message names",
    "RegistrationError": "choose an id that exists, or register it before use ([environments](../environments.md))",
    "TaskError": "correct the row of the dataset ([environments](../environments.md))",
    "InfraError": "restore the service that failed; the episode has no reward and is tried again or excluded",
    "TaskRowError": "correct the row of the dataset ([agents](../agents.md))",
    "BackendError": "look at the server of the model; the trajectory fails and others continue",
    "UnavailableError": "wait or restore the server: the call is retried until its deadline",
    "BatchFailedError": "correct the commonest cause, which the message quotes",
    "StageTimeout": "raise the deadline of the stage in the [task file](../agent-settings.md), or find what is slow",
    "RequestError": "correct the field of the request that the message names ([server](../tinker.md))",
    "Busy": "send the request again after the time that the answer names; raise the limit if the machine can take more",
    "ModelError": "correct the request, or restore the model from its last checkpoint ([server](../tinker.md))",
}
"""Class -> what to do about an error whose message states a rule alone."""
_REMEDY = re.compile(
    r"(?:[;:,.]|, or) (?=(?:or )?(?:use|set|leave|remove|install|switch|make|start|lower|raise|give|check|name|choose|"
    r"take|put|add|write|run|wait|move|delete|try|list|turn|build|pass|call|register|replace|increase|reduce|declare|keep|go|"
    r"begin|load|train|resume|point|mark|open|upgrade|allow|ask|did you mean)\b)",
    re.IGNORECASE,
)
_NAME = re.compile(rf"(?:[a-z_]+|{GAP})(?:\.(?:\w+|{GAP}))+")


@dataclass(frozen=True)
class ErrorText:
    """Text of an error as the source has it."""

    kind: str
    """Name of the error's class."""
    text: str
    """The message, with `GAP` for values."""
    place: str
    """File, relative to the repository."""

    @property
    def cause(self) -> str:
        """The message up to the remedy: what is wrong."""
        return _REMEDY.split(self.text, maxsplit=1)[0]

    @property
    def remedy(self) -> str:
        """The rest of the message: what to do; empty if the message states a rule alone."""
        parts = _REMEDY.split(self.text, maxsplit=1)
        return parts[1] if len(parts) > 1 else ""

    def settings(self, names: dict[str, str]) -> list[str]:
        """Return the settings that the message names, in order; a gap before its last part matches any."""
        found: dict[str, None] = {}
        for name in _NAME.findall(self.text):
            if name in names:
                found[name] = None
            elif GAP in name and not name.endswith(GAP):
                pattern = re.compile(re.escape(name).replace(GAP, r"[\w.]+"))
                matches = [each for each in names if pattern.fullmatch(each)]
                found |= dict.fromkeys(matches if len(matches) <= 4 else [])
        return list(found)


def collect(root: Path) -> list[ErrorText]:
    """Return the texts of all errors of the classes in `ERROR_FILES`, without repetitions."""
    kinds = descriptions(root)
    calls = re.compile(rf"\b(?:{'|'.join([*kinds, *RAISING])})\(")
    found: dict[tuple[str, str], ErrorText] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            place = str(path.relative_to(root))
            if not calls.search(path.read_text()):
                continue
            texts = _Constants(root, path)
            for node in ast.walk(_tree(path)):
                kind, argument = _raised(node, kinds)
                text = " ".join(texts.of(argument).split()) if argument is not None else ""
                if len(re.sub(rf"[^\w]|{GAP}", "", text)) >= 12:
                    found.setdefault((kind, text), ErrorText(kind, text, place))
    return list(found.values())


def descriptions(root: Path) -> dict[str, str]:
    """Return the name and the docstring of each class of error."""
    return {
        node.name: " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        for path in reversed(ERROR_FILES)  # of a name in several packages, the first one's
        for node in _tree(root / path).body
        if isinstance(node, ast.ClassDef)
    }


def page(root: Path, names: dict[str, str]) -> str:
    """Return the page: a section for each group of settings, then one for each class of the other errors."""
    errors = collect(root)
    by_section: dict[str, list[tuple[ErrorText, list[str]]]] = {}
    others: dict[str, list[ErrorText]] = {}
    for error in errors:
        named = error.settings(names)
        if named:
            by_section.setdefault(named[0].rpartition(".")[0], []).append((error, named))
        else:
            others.setdefault(error.kind, []).append(error)
    lines = [
        "# Error index",
        "",
        '<div data-filter="a part of the message, or a setting"></div>',
        "",
        f"{len(errors)} messages, made from the source at each build; `{GAP}` stands for a value. The second column",
        "is what the message itself recommends or, where it states a rule alone, the meaning of the setting.",
        "",
    ]
    for section in sorted(by_section):
        lines += [f"## {section}", "", "| message | fix | settings |", "|---|---|---|"]
        for error, named in by_section[section]:
            links = ", ".join(f"[`{name}`](../configuration.md#{name})" for name in named)
            fix = _cell(error.remedy) if error.remedy else f"{names[named[0]]}"
            lines.append(f"| {_cell(error.cause)} | {fix} | {links} |")
        lines.append("")
    for kind, meaning in descriptions(root).items():
        if kind in others:
            lines += [f"## {kind}", "", meaning, "", "| message | fix | raised in |", "|---|---|---|"]
            for error in others[kind]:
                fix = _cell(error.remedy) if error.remedy else REMEDIES.get(kind, meaning)
                lines.append(f"| {_cell(error.cause)} | {fix} | `{error.place}` |")
            lines.append("")
    return "\n".join(lines)


def _raised(node: ast.AST, kinds: dict[str, str]) -> tuple[str, ast.expr | None]:
    """Return the class of an error and the expression of its text; None if the node makes no error."""
    if isinstance(node, ast.Call) and node.args:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in RAISING:
            return RAISING[name], node.args[-1]
        if name in kinds:
            return name, max(node.args, key=lambda argument: isinstance(argument, ast.JoinedStr | ast.BinOp))
    return "", None


class _Constants:
    """Texts of expressions of one module, with the constants that it defines or imports filled in."""

    def __init__(self, root: Path, path: Path):
        self._values = dict(_constants(path))
        for node in _tree(path).body:
            constants = node.names if isinstance(node, ast.ImportFrom) else []
            constants = [alias for alias in constants if alias.name.isupper()]
            if isinstance(node, ast.ImportFrom) and node.module and constants:
                source = _module_file(root, node.module)
                if source is not None:
                    theirs = _constants(source)
                    for alias in constants:
                        if alias.name in theirs:
                            self._values[alias.asname or alias.name] = theirs[alias.name]

    def of(self, node: ast.expr) -> str:
        """Return the text of an expression, with `GAP` for what is not a constant."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.of(part) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.of(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.of(node.left) + self.of(node.right)
        if isinstance(node, ast.Name) and node.id in self._values:
            return self._values[node.id]
        if isinstance(node, ast.IfExp):
            return max(self.of(node.body), self.of(node.orelse), key=len)
        return GAP


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _constants(path: Path) -> dict[str, str]:
    """Return the texts that a module binds to names at its top."""
    return {
        target.id: node.value.value
        for node in _tree(path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@cache
def _module_file(root: Path, module: str) -> Path | None:
    """Return the file of a module of ours."""
    for package in PACKAGES:
        folder = root / package
        if module.split(".")[0] == folder.name:
            path = folder.parent.joinpath(*module.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.exists():
                    return file
    return None


def _cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return re.sub(r"[\\`*_{}\[\]|#~$]", lambda match: f"&#{ord(match[0])};", html.escape(text, quote=False))
