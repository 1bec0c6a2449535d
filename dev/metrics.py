#!/usr/bin/env python3
"""Table of figures about the shape and the language of the source, for each runtime package and in all.

    python dev/metrics.py                     the table
    python dev/metrics.py --json              the same as JSON
    python dev/metrics.py --list openings     each place behind a figure (--help has the names)
    python dev/metrics.py --texts             docstrings and test names of tests, examples, kits
    python dev/metrics.py --root DIRECTORY    another checkout

Nothing is imported: files are parsed with `ast` and `tokenize`. `tests/test_language.py` holds the goals.
"""

import argparse
import ast
import io
import itertools
import json
import re
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {  # import name: (source, tests), below the root
    "skyrl_gym": ("skyrl-gym/skyrl_gym", "skyrl-gym/tests"),
    "skyrl_train": ("skyrl-train/skyrl_train", "skyrl-train/tests"),
    "skyrl_agent": ("skyrl-agent/skyrl_agent", "skyrl-agent/tests"),
    "tx": ("skyrl-tx/tx", "skyrl-tx/tests"),
}
TEXT_TREES = {  # measured for their language alone: name -> folder
    "skyrl_train_testing": "skyrl-train/skyrl_train_testing",
    "tx_conformance": "skyrl-tx/tx_conformance",
    **{folder: folder for folder in ("examples", "benchmarks", "dev", "tests")},
    **{f"tests of {name}": tests for name, (_, tests) in PACKAGES.items()},
}
GENERATED = re.compile(r"_pb2\.pyi?$")

# A docstring opens with a verb or with a noun phrase, never with one of these. Peers have about 1 % of them.
FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """what who whom whose which whether where when how why that of as for if from in with by to on at it its until
        till while once and or but so then than because since after before under over about through during without
        within into there they he she""",
    )
)
# The third person ("Puts the …") where the imperative belongs: a word in -s before an article or a pronoun.
THIRD_PERSON = re.compile(
    r"(?!this|its|as|always)[a-z]*[a-rt-z]s (the|an?|all|each|its?|one|every|what|this|them|any|these|those|their)\b",
    re.IGNORECASE,
)
SUBTLE = re.compile(
    r"torch\.distributed|import threading|from threading import|import fcntl|multiprocessing"
    r"|asyncio\.(Lock|Condition|Semaphore|Event)\b|torch\.nn\.functional"
)
# Modules below the part that they are in by name: others of that part import what imports them.
OWN_PARTS = ("skyrl_gym.envs.registration", "skyrl_gym.envs.base_text_env", "skyrl_agent.integrations.base")
LAST_ADDED = {  # kind of addition, as the first table of docs/extending.md calls it: (package, name of an entry)
    "a policy loss": ("skyrl_train", "sapo"),
    "… with settings": ("skyrl_train", "decoupled_ppo"),
    "an advantage estimator": ("skyrl_train", "maxrl"),
    "a filter of trajectories or groups": ("skyrl_train", "overlong_filtering_by"),
    "a tracking service": ("skyrl_train", "swanlab"),
    "a training backend": ("skyrl_train", "megatron"),
    "a rollout engine": ("skyrl_train", "sglang"),
    "an environment": ("skyrl_gym", "textworld"),
    "a read-only endpoint (GET) of the Tinker server": ("tx", "training_runs"),
}
NUMERICS = ("skyrl_train/algorithms/", "skyrl_train/models/", "skyrl_train/weight_sync/", "tx/tinker/backends/torch/")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Module:
    """One parsed source file."""

    name: str
    """Dotted name, as it is imported."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def comment_lines(self) -> set[int]:
        if "#" not in self.text:
            return set()
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}

    @cached_property
    def definitions(self) -> list[tuple[Definition, tuple[Definition, ...]]]:
        """Classes and functions, each with the definitions around it, outermost first."""
        found: list[tuple[Definition, tuple[Definition, ...]]] = []

        def visit(node: ast.AST, around: tuple[Definition, ...]) -> None:
            for child in ast.iter_child_nodes(node):
                inside = around
                if isinstance(child, Definition):
                    found.append((child, around))
                    inside = (*around, child)
                if not isinstance(child, ast.expr):
                    visit(child, inside)

        visit(self.tree, ())
        return found

    @cached_property
    def code_lines(self) -> dict[int, str]:
        """Lines with code by number: neither blank, nor a comment alone, nor part of a string that is a statement."""
        texts: set[int] = set()
        for node in self.nodes:
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        stripped = ((number, line.strip()) for number, line in enumerate(self.lines, start=1))
        return {number: line for number, line in stripped if line and line[0] != "#" and number not in texts}

    @property
    def is_subtle(self) -> bool:
        """Return True if numerics, collectives or locks are at work."""
        return any(folder in self.path.as_posix() for folder in NUMERICS) or bool(SUBTLE.search(self.text))

    def place(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclass
class Figures:
    """Counts of one package, from which the rows of the table are computed. Each place is `file:line detail`."""

    name: str
    source_lines: int = 0
    test_lines: int = 0
    files: int = 0
    function_lengths: list[int] = field(default_factory=list)
    public_functions: int = 0
    untyped: list[str] = field(default_factory=list)
    public_names: int = 0
    undocumented: list[str] = field(default_factory=list)
    any_uses: list[str] = field(default_factory=list)
    code_lines: int = 0
    comments: int = 0
    subtle_code_lines: int = 0
    subtle_comments: int = 0
    docstrings: int = 0
    openings: list[str] = field(default_factory=list)
    field_docstrings: int = 0
    field_openings: list[str] = field(default_factory=list)
    third_person: list[str] = field(default_factory=list)
    test_names: int = 0
    test_name_openings: list[str] = field(default_factory=list)
    repeated_classes: list[str] = field(default_factory=list)
    mutual_modules: list[str] = field(default_factory=list)
    mutual_parts: list[str] = field(default_factory=list)
    broad_excepts: list[str] = field(default_factory=list)
    unexplained_excepts: list[str] = field(default_factory=list)

    def per_1000_lines(self, places: list[str]) -> float:
        return 1000 * len(places) / max(self.source_lines, 1)


TEXT_ROWS: dict[str, Callable[[Figures], float]] = {
    "docstrings that open with a relative or function word, %": lambda f: 100 * len(f.openings) / max(f.docstrings, 1),
    "field docstrings that open with one, %": lambda f: 100 * len(f.field_openings) / max(f.field_docstrings, 1),
    "docstrings in the third person, %": lambda f: (
        100 * len(f.third_person) / max(f.docstrings + f.field_docstrings, 1)
    ),
    "test names that open with a relative or function word, %": lambda f: (
        100 * len(f.test_name_openings) / max(f.test_names, 1)
    ),
}
ROWS: dict[str, Callable[[Figures], float]] = {
    "lines of source": lambda f: f.source_lines,
    "lines of tests": lambda f: f.test_lines,
    "files": lambda f: f.files,
    "functions": lambda f: len(f.function_lengths),
    "lines of a function, median": lambda f: statistics.median(f.function_lengths or [0]),
    "lines of a function, 90th percentile": lambda f: sorted(f.function_lengths or [0])[
        len(f.function_lengths) * 9 // 10
    ],
    "public functions typed, %": lambda f: 100 * (1 - len(f.untyped) / max(f.public_functions, 1)),
    "public names documented, %": lambda f: 100 * (1 - len(f.undocumented) / max(f.public_names, 1)),
    "Any per 1,000 lines": lambda f: f.per_1000_lines(f.any_uses),
    "comments per 100 code lines": lambda f: 100 * f.comments / max(f.code_lines, 1),
    "comments per 100 code lines, numerics, collectives, locks": lambda f: (
        100 * f.subtle_comments / max(f.subtle_code_lines, 1)
    ),
    **{row: figure for row, figure in TEXT_ROWS.items() if not row.startswith("test")},
    "class names used twice": lambda f: len(f.repeated_classes),
    "modules that import each other": lambda f: len(f.mutual_modules),
    "parts that import each other": lambda f: len(f.mutual_parts),
    "broad excepts per 1,000 lines": lambda f: f.per_1000_lines(f.broad_excepts),
    "broad excepts without a reason": lambda f: len(f.unexplained_excepts),
}
LISTS: dict[str, Callable[[Figures], list[str]]] = {
    "openings": lambda f: f.openings,
    "fields": lambda f: f.field_openings,
    "third": lambda f: f.third_person,
    "names": lambda f: f.test_name_openings,
    "any": lambda f: f.any_uses,
    "classes": lambda f: f.repeated_classes,
    "modules": lambda f: f.mutual_modules,
    "parts": lambda f: f.mutual_parts,
    "excepts": lambda f: f.broad_excepts,
    "unexplained": lambda f: f.unexplained_excepts,
    "documented": lambda f: f.undocumented,
    "typed": lambda f: f.untyped,
}


@dataclass(frozen=True)
class Limit:
    """Goal of a package or a tree of texts."""

    row: str
    """Row of the table that the goal is about."""

    goal: float
    at_least: bool = False
    """Whether the goal is a lower bound (else an upper one)."""

    def is_met(self, figures: Figures) -> bool:
        value = (ROWS | TEXT_ROWS)[self.row](figures)
        return value >= self.goal if self.at_least else value <= self.goal


TEXT_LIMITS = {
    "openings": Limit("docstrings that open with a relative or function word, %", 3),
    "fields": Limit("field docstrings that open with one, %", 3),
    "third": Limit("docstrings in the third person, %", 1),
    "names": Limit("test names that open with a relative or function word, %", 1),
}
LIMITS = {
    **{name: limit for name, limit in TEXT_LIMITS.items() if limit.row in ROWS},
    "any": Limit("Any per 1,000 lines", 12),
    "classes": Limit("class names used twice", 0),
    "modules": Limit("modules that import each other", 0),
    "parts": Limit("parts that import each other", 0),
    "excepts": Limit("broad excepts per 1,000 lines", 1),
    "unexplained": Limit("broad excepts without a reason", 0),
    "documented": Limit("public names documented, %", 80, at_least=True),
    "uncommented": Limit("comments per 100 code lines, numerics, collectives, locks", 5, at_least=True),
}


def read_modules(root: Path, source: str) -> list[Module]:
    """Read the Python files of a package; those made by a compiler are left out."""
    folder = root / source
    modules = []
    for path in sorted(folder.rglob("*.py")):
        if not GENERATED.search(path.name):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            modules.append(Module(".".join(parts).removesuffix(".__init__"), path.relative_to(root), path.read_text()))
    return modules


def is_public(node: Definition, around: Iterable[Definition]) -> bool:
    return not any(part.name.startswith("_") or isinstance(part, FUNCTION) for part in around) and node.name[0] != "_"


def is_typed(function: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in function.decorator_list)
    named = named[1:] if is_method and not static else named
    others = [*arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    return function.returns is not None and all(item.annotation for item in [*named, *others])


def is_bool_property(node: ast.AST) -> bool:
    if not isinstance(node, FUNCTION) or not isinstance(node.returns, ast.Name) or node.returns.id != "bool":
        return False
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def field_docstrings(module: Module) -> Iterator[tuple[ast.AnnAssign | ast.Assign, str]]:
    """Yield the assignments of constants, attributes and fields that are followed by a docstring."""
    for node in module.nodes:
        body = getattr(node, "body", None)
        for statement, after in itertools.pairwise(body) if isinstance(body, list) else ():
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(statement, ast.AnnAssign | ast.Assign) and isinstance(text, str):
                yield statement, text.strip()


def is_for_models(node: ast.AST) -> bool:
    """Return True if the docstring describes a tool to a model: that is a prompt."""
    if not isinstance(node, FUNCTION):
        return False
    is_tool = any("tool" in ast.unparse(decorator) for decorator in node.decorator_list)
    return is_tool or (node.name == "run" and "ToolContext" in ast.unparse(node.args))


def count_texts(modules: list[Module], figures: Figures) -> None:
    """Count docstrings of definitions and fields, and names of tests, and how they open."""
    for module in modules:
        for statement, docstring in field_docstrings(module):
            figures.field_docstrings += 1
            annotation = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
            is_bool = annotation in ("bool", "ClassVar[bool]")
            place = f"{module.place(statement)} {docstring.splitlines()[0]}"
            if opens_with_function_word(docstring, is_bool):
                figures.field_openings.append(place)
            if THIRD_PERSON.match(docstring):
                figures.third_person.append(place)
        for node in (module.tree, *(node for node, _ in module.definitions)):
            if isinstance(node, FUNCTION) and node.name.startswith("test_"):
                figures.test_names += 1
                if node.name.split("_")[1] in FUNCTION_WORDS:
                    figures.test_name_openings.append(f"{module.place(node)} {node.name}")
            if docstring := ast.get_docstring(node):
                figures.docstrings += 1
                place = f"{module.place(node)} {docstring.splitlines()[0]}"
                if opens_with_function_word(docstring, is_bool_property(node)):
                    figures.openings.append(place)
                if THIRD_PERSON.match(docstring) and not is_for_models(node):
                    figures.third_person.append(place)


def opens_with_function_word(docstring: str, is_bool: bool) -> bool:
    """Check the first word of a docstring. `whether` may open that of a bool."""
    opening = (re.match(r"[A-Za-z]+(?![A-Za-z-])", docstring) or [""])[0].lower()  # "On-policy …" is a noun
    return opening in FUNCTION_WORDS and not (opening == "whether" and is_bool)


def count_documentation(modules: list[Module], figures: Figures) -> None:
    """Count public names without a docstring.

    A method counts as documented where a class of the same package that it inherits from documents it.
    """
    bases: dict[str, set[str]] = defaultdict(set)
    documented: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node, around in module.definitions:
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
            elif around and isinstance(around[-1], ast.ClassDef) and ast.get_docstring(node):
                documented[around[-1].name].add(node.name)

    def inherits_docstring(owner: str, method: str, seen: frozenset[str] = frozenset()) -> bool:
        return owner not in seen and any(
            method in documented[base] or inherits_docstring(base, method, seen | {owner})
            for base in bases.get(owner, ())
        )

    for module in modules:
        for node, around in module.definitions:
            if is_public(node, around):
                figures.public_names += 1
                owner = around[-1].name if around else ""
                if not ast.get_docstring(node) and not inherits_docstring(owner, node.name):
                    figures.undocumented.append(f"{module.place(node)} {node.name}")


def count_definitions(modules: list[Module], figures: Figures) -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node, around in module.definitions:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module.place(node))
                continue
            figures.function_lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if is_public(node, around):
                figures.public_functions += 1
                if not is_typed(node, bool(around)):
                    figures.untyped.append(f"{module.place(node)} {node.name}")
    figures.repeated_classes = [f"{name} {' '.join(at)}" for name, at in sorted(classes.items()) if len(at) > 1]


def count_any(modules: list[Module], figures: Figures) -> None:
    """Count the word `Any` in code, imports included."""
    for module in modules:
        for number, line in module.code_lines.items():
            figures.any_uses += [f"{module.path}:{number} {line}"] * len(re.findall(r"\bAny\b", line.split(" # ")[0]))


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Return True if a handler ends exceptions of all classes. One that raises the same again ends none."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(item, ast.Name) and item.id in ("Exception", "BaseException") for item in caught)


def count_excepts(modules: list[Module], figures: Figures) -> None:
    """Count handlers of all exceptions; the reason is a comment on the line, the one above or the one below."""
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                figures.broad_excepts.append(f"{module.place(node)} {module.lines[node.lineno - 1].strip()}")
                if not module.comment_lines & {node.lineno - 1, node.lineno, node.lineno + 1}:
                    figures.unexplained_excepts.append(figures.broad_excepts[-1])


def imports_of(module: Module, names: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield modules among `names` that a module imports, each with whether it does so when it is imported itself."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule if submodule in names else node.module), at_import
        elif isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from visit(child, at_import and not isinstance(node, FUNCTION))

    for name, at_import in visit(module.tree, True):
        if name in names and name != module.name:
            yield name, at_import


def part_of(module: str) -> str:
    """Return the folder or file right below the package (of the server: below `tx.tinker`) that a module belongs to."""
    if module in OWN_PARTS:
        return module
    pieces = module.split(".")
    return ".".join(pieces[: 3 if pieces[:2] == ["tx", "tinker"] else 2])


def count_mutual_imports(modules: list[Module], figures: Figures) -> None:
    """Count pairs of modules that import each other at any time, and pairs of parts that do so when imported."""
    names = {module.name for module in modules}
    between_modules: set[tuple[str, str]] = set()
    between_parts: set[tuple[str, str]] = set()
    for module in modules:
        for name, at_import in imports_of(module, names):
            between_modules.add((module.name, name))
            if at_import:
                between_parts.add((part_of(module.name), part_of(name)))

    def mutual(edges: set[tuple[str, str]]) -> list[str]:
        return [f"{a} {b}" for a, b in sorted(edges) if a < b and (b, a) in edges]

    figures.mutual_modules = mutual(between_modules)
    figures.mutual_parts = mutual(between_parts)


def measure(name: str, root: Path = ROOT) -> tuple[Figures, list[Module]]:
    """Measure one package of a checkout."""
    source, tests = PACKAGES[name]
    modules = read_modules(root, source)
    figures = Figures(name, files=len(modules))
    figures.source_lines = sum(len(module.lines) for module in modules)
    figures.test_lines = sum(len(path.read_text().splitlines()) for path in sorted((root / tests).rglob("*.py")))
    for module in modules:
        comments, code = len(module.comment_lines), len(module.code_lines)
        figures.comments += comments
        figures.code_lines += code
        if module.is_subtle:
            figures.subtle_comments += comments
            figures.subtle_code_lines += code
    for count in (count_texts, count_documentation, count_definitions, count_any, count_excepts, count_mutual_imports):
        count(modules, figures)
    return figures, modules


def measure_texts(name: str, root: Path = ROOT) -> Figures:
    """Measure the language of tests, examples or a kit."""
    figures = Figures(name)
    count_texts(read_modules(root, TEXT_TREES[name]), figures)
    return figures


def add_up(packages: Iterable[Figures]) -> Figures:
    """Join the figures of packages: counts are added, places are listed one after the other."""
    whole = Figures("all")
    for figures, name in itertools.product(packages, Figures.__dataclass_fields__):
        if name != "name":
            setattr(whole, name, getattr(whole, name) + getattr(figures, name))
    return whole


def measure_all(root: Path = ROOT) -> list[Figures]:
    """Measure each runtime package and, last, all of them together."""
    packages = [measure(name, root)[0] for name in PACKAGES]
    return [*packages, add_up(packages)]


def places_per_change(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the places of the last added entry of each kind: the runtime files whose code names it, and the folder or
    file that has its name, as one."""
    return {kind: sorted(places_of(entry, package, root)) for kind, (package, entry) in LAST_ADDED.items()}


def places_of(entry: str, package: str, root: Path) -> set[str]:
    source = PACKAGES[package][0]
    places = set()
    for module in read_modules(root, source):
        parts = module.path.relative_to(source).with_suffix("").parts
        if entry in parts:
            places.add("/".join(parts[: parts.index(entry) + 1]))
        elif entry in module.text:  # perhaps in a comment or a docstring alone
            code = "\n".join(line.split(" # ")[0] for line in module.code_lines.values())
            if re.search(rf"\b{entry}\b", code):
                places.add("/".join(parts))
    return places


def format_figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", choices=LISTS, help="print each place behind a figure")
    parser.add_argument("--texts", action="store_true", help="measure the texts of tests, examples and kits instead")
    options = parser.parse_args()
    rows, packages = ROWS, measure_all(options.root)
    if options.texts:
        packages = [measure_texts(name, options.root) for name in TEXT_TREES]
        rows, packages = TEXT_ROWS, [*packages, add_up(packages)]
    if options.list:
        print(*LISTS[options.list](packages[-1]), sep="\n")
        return
    table = {row: {figures.name: compute(figures) for figures in packages} for row, compute in rows.items()}
    if options.json:
        print(json.dumps({"packages": table, "places_per_change": places_per_change(options.root)}, indent=1))
        return
    print("| |", " | ".join(figures.name for figures in packages), "|")
    print("|---|" + "---:|" * len(packages))
    for row, values in table.items():
        print(f"| {row} |", " | ".join(map(format_figure, values.values())), "|")
    if not options.texts:
        print("\n| places per change | files | of the last added one |\n|---|---:|---|")
        for kind, places in places_per_change(options.root).items():
            print(f"| {kind} | {len(places)} | {LAST_ADDED[kind][1]}: {', '.join(places)} |")


if __name__ == "__main__":
    main()
