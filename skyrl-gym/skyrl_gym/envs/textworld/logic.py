"""The rule language of TextWorld's games: types, rules that rewrite facts, and how a rule is said as a command.

    type c : t {
        rules { open/c :: $at(P, r) & $at(c, r) & closed(c) -> open(c); }
        inform7 { commands { open/c :: "open {c}" :: "opening the {c}"; } }
    }

Left of the arrow is what must hold; what has a `$` stays, the rest is taken away, and the right side is added. A
variable is named for its type, with primes or digits, or says it as `d1: d`. `P` is the player and `I` what the player
carries. Constraints and reverse rules are for making worlds, not for playing them, and are skipped.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from skyrl_gym.error import TaskError

PLAYER, INVENTORY = "P", "I"

CONSTANTS = {PLAYER: PLAYER, INVENTORY: INVENTORY}
"""Names that are things, not variables, in rules."""


@dataclass(frozen=True)
class Atom:
    """A predicate of things (a fact) or of variables (in a rule)."""

    name: str
    arguments: tuple[str, ...]

    def bound(self, binding: Mapping[str, str]) -> "Atom":
        return Atom(self.name, tuple(binding[argument] for argument in self.arguments))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


@dataclass(frozen=True)
class Rule:
    """One way of changing facts."""

    name: str
    conditions: tuple[Atom, ...]
    removed: tuple[Atom, ...]
    added: tuple[Atom, ...]
    types: Mapping[str, str]
    """Type of each variable."""


@dataclass(frozen=True)
class Action:
    """A rule with its variables bound to things."""

    rule: Rule
    binding: Mapping[str, str]

    def apply(self, facts: frozenset[Atom]) -> frozenset[Atom]:
        removed = {atom.bound(self.binding) for atom in self.rule.removed}
        return (facts - removed) | {atom.bound(self.binding) for atom in self.rule.added}


@dataclass
class Logic:
    """All types, rules and commands of a game."""

    parents: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Names of types: "container" for `c`."""
    rules: list[Rule] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    """Rule name to template, "open {c}"."""
    aliases: dict[str, tuple[tuple[str, ...], Atom]] = field(default_factory=dict)
    """`south_of(r, r') = north_of(r', r)`: parameters and what they stand for."""

    def is_a(self, kind: str, wanted: str) -> bool:
        """Check whether a type is a subtype of another type."""
        return kind == wanted or any(self.is_a(parent, wanted) for parent in self.parents.get(kind, ()))

    def normal(self, atom: Atom) -> Atom:
        """Return the atom without aliases, so that one fact has one form."""
        if atom.name not in self.aliases:
            return atom
        parameters, target = self.aliases[atom.name]
        return target.bound(dict(zip(parameters, atom.arguments, strict=True)))

    def actions(self, facts: Iterable[Atom], types: Mapping[str, str]) -> Iterator[Action]:
        """Return all possible actions under these facts. `types` maps each thing to its type."""
        by_name: dict[str, list[Atom]] = {}
        for fact in sorted(facts, key=str):
            by_name.setdefault(fact.name, []).append(fact)
        for rule in self.rules:
            for binding in self._find_bindings(rule, rule.conditions, CONSTANTS, by_name, types):
                yield Action(rule, binding)

    def _find_bindings(
        self,
        rule: Rule,
        conditions: tuple[Atom, ...],
        binding: Mapping[str, str],
        facts: Mapping[str, list[Atom]],
        types: Mapping[str, str],
    ) -> Iterator[Mapping[str, str]]:
        if not conditions:
            yield binding
            return
        condition, *rest = conditions
        for fact in facts.get(condition.name, ()):
            extended = self._extend_binding(rule, condition, fact, binding, types)
            if extended is not None:
                yield from self._find_bindings(rule, tuple(rest), extended, facts, types)

    def _extend_binding(
        self, rule: Rule, condition: Atom, fact: Atom, binding: Mapping[str, str], types: Mapping[str, str]
    ) -> dict[str, str] | None:
        if len(condition.arguments) != len(fact.arguments):
            return None
        extended = dict(binding)
        for variable, thing in zip(condition.arguments, fact.arguments, strict=True):
            if not self.is_a(types[thing], rule.types[variable]) or extended.setdefault(variable, thing) != thing:
                return None
        return extended


_TOKEN = re.compile(r'"[^"]*"|#[^\n]*|[{};]|[^"{};#]+')
_ATOM = re.compile(r"(\$?)\s*([\w/]+)\s*\(([^()]*)\)")

Block = list["str | tuple[str, Block]"]
"""Statements, and blocks with their headers."""


def parse_logic(text: str) -> Logic:
    """Raises TaskError for text that is not of the language."""
    logic = Logic()
    tokens = (token for token in _TOKEN.findall(text) if not token.startswith("#"))
    for header, block in _split_blocks(_parse_block(tokens)):
        words = re.split(r"[:&,\s]+", header.strip())
        if len(words) < 2 or words[0] != "type":
            raise TaskError(f"game.KB.logic must consist of 'type NAME : PARENT {{ }}'; got {header.strip()!r}")
        _read_type(logic, words[1], [parent for parent in words[2:] if parent], block)
    for number, rule in enumerate(logic.rules):  # aliases may be defined after their use
        logic.rules[number] = _resolve_aliases(logic, rule)
    return logic


def _parse_block(tokens: Iterator[str]) -> Block:
    block: Block = []
    words: list[str] = []
    for token in tokens:
        if token == "{":
            block.append(("".join(words).strip(), _parse_block(tokens)))
            words = []
        elif token == "}":
            return block
        elif token == ";":
            block.append("".join(words).strip())
            words = []
        else:
            words.append(token)
    if "".join(words).strip():
        raise TaskError(f"game.KB.logic ends within a statement: {''.join(words).strip()!r:.200}")
    return block


def _split_blocks(block: Block) -> Iterator[tuple[str, Block]]:
    return (part for part in block if isinstance(part, tuple))


def _read_type(logic: Logic, name: str, parents: list[str], block: Block) -> None:
    logic.parents[name] = parents
    for header, part in _split_blocks(block):
        statements = [statement for statement in part if isinstance(statement, str)]
        if header == "predicates":
            _read_aliases(logic, statements)
        elif header == "rules":
            logic.rules += [_read_rule(statement) for statement in statements]
        elif header == "inform7":
            _read_words(logic, name, part)


def _read_aliases(logic: Logic, statements: list[str]) -> None:
    for statement in statements:
        left, equals, right = statement.partition("=")
        if equals:
            [(_, alias, parameters)], [(_, name, arguments)] = _ATOM.findall(left), _ATOM.findall(right)
            logic.aliases[alias] = (tuple(_parse_names(parameters)), Atom(name, tuple(_parse_names(arguments))))


def _read_words(logic: Logic, type_name: str, block: Block) -> None:
    for header, part in _split_blocks(block):
        for statement in part:
            if not isinstance(statement, str):
                continue
            name, _, text = statement.partition("::")
            quoted = re.findall(r'"([^"]*)"', text)
            if header == "commands" and quoted:
                logic.commands[name.strip()] = quoted[0]
            elif header == "type" and name.strip() == "kind" and quoted:
                logic.kinds[type_name] = quoted[0].removesuffix("-like")


def _read_rule(statement: str) -> Rule:
    name, colons, body = statement.partition("::")
    left, arrow, right = body.partition("->")
    if not (colons and arrow and _ATOM.search(left)):
        raise TaskError(f"a rule of game.KB.logic must have the form 'name :: facts -> facts'; got {statement!r:.200}")
    types: dict[str, str] = {}
    conditions, removed = [], []
    for stays, predicate, arguments in _ATOM.findall(left):
        atom = _parse_typed_atom(predicate, arguments, types)
        conditions.append(atom)
        if not stays:
            removed.append(atom)
    added = [_parse_typed_atom(predicate, arguments, types) for _, predicate, arguments in _ATOM.findall(right)]
    bound = {argument for atom in conditions for argument in atom.arguments} | set(CONSTANTS)
    unbound = {argument for atom in added for argument in atom.arguments} - bound
    if unbound:
        raise TaskError(
            f"rule {name.strip()} of game.KB.logic adds facts with unbound variables {', '.join(sorted(unbound))}"
        )
    return Rule(name.strip(), tuple(conditions), tuple(removed), tuple(added), types)


def _parse_names(arguments: str) -> list[str]:
    return [argument.partition(":")[0].strip() for argument in arguments.split(",") if argument.strip()]


def _parse_typed_atom(predicate: str, arguments: str, types: dict[str, str]) -> Atom:
    for argument in filter(str.strip, arguments.split(",")):
        variable, colon, type_name = (part.strip() for part in argument.partition(":"))
        types[variable] = type_name if colon else types.get(variable, variable.rstrip("'0123456789"))
    return Atom(predicate, tuple(_parse_names(arguments)))


def _resolve_aliases(logic: Logic, rule: Rule) -> Rule:
    conditions, removed, added = (
        tuple(map(logic.normal, part)) for part in (rule.conditions, rule.removed, rule.added)
    )
    return Rule(rule.name, conditions, removed, added, rule.types)
