"""A game as its JSON file says it (facts, things, rules, quests), and one playing of it. Speaks in commands only."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import mapping_of
from skyrl_gym.envs.textworld.house import HOUSE_RULES
from skyrl_gym.envs.textworld.logic import CONSTANTS, PLAYER, Action, Atom, Logic, parse_logic
from skyrl_gym.error import TaskError


@dataclass(frozen=True)
class Thing:
    """Something in the world, or a room of it."""

    id: str
    type: str
    name: str
    description: str = ""


@dataclass(frozen=True)
class Quest:
    """Reached, once, when all facts of one of the `wins` hold; failed likewise."""

    reward: int
    wins: tuple[tuple[Atom, ...], ...]
    fails: tuple[tuple[Atom, ...], ...]
    optional: bool = False
    """The game is won without it, too."""

    @property
    def is_needed(self) -> bool:
        return bool(self.wins) and not self.optional


@dataclass(frozen=True)
class Game:
    """Static description of a game: what does not change while it is played."""

    logic: Logic
    facts: frozenset[Atom]
    things: Mapping[str, Thing]
    quests: Sequence[Quest]
    objective: str
    walkthrough: Sequence[str]

    @property
    def max_score(self) -> int:
        return sum(quest.reward for quest in self.quests)


def parse_game(value: object) -> Game:
    """Return a game from the JSON object of its file, or its text.

    Raises:
        TaskError: a part is missing or not of its form.
    """
    game = mapping_of("game", value)
    for key in ("world", "quests"):
        if not isinstance(game.get(key), Sequence):
            raise TaskError(f"game.{key} must be a list; the game has {', '.join(game) or 'nothing'}")
    logic = _parse_logic((game.get("KB") or {}).get("logic") or HOUSE_RULES)
    try:
        types: dict[str, str] = dict(CONSTANTS)
        facts = frozenset(logic.normal(_parse_atom(fact, types)) for fact in game["world"])
        infos = {info["id"]: info for info in (pair[1] for pair in game.get("infos") or [])}
        quests = [_parse_quest(quest, logic) for quest in game["quests"]]
    except (KeyError, TypeError, IndexError, ValueError) as fault:
        raise TaskError(f"game is not of TextWorld's format: {fault!r}") from fault
    if not any(quest.is_needed for quest in quests):
        raise TaskError("game.quests must have a non-optional quest with win_events; otherwise the game cannot be won")
    if not any(fact.name == "at" and fact.arguments[0] == PLAYER for fact in facts):
        raise TaskError("game.world must contain the player's location: at(P, room)")
    return Game(
        logic=logic,
        facts=facts,
        things={name: _parse_thing(name, kind, infos.get(name, {})) for name, kind in types.items()},
        quests=quests,
        objective=str(game.get("objective") or ""),
        walkthrough=list((game.get("metadata") or {}).get("walkthrough") or []),
    )


@functools.lru_cache(maxsize=32)
def _parse_logic(text: str) -> Logic:
    return parse_logic(text)


def _parse_atom(fact: Mapping[str, Any], types: dict[str, str]) -> Atom:
    for argument in fact["arguments"]:
        types[argument["name"]] = argument["type"]
    return Atom(fact["name"], tuple(argument["name"] for argument in fact["arguments"]))


def _parse_thing(name: str, kind: str, info: Mapping[str, object]) -> Thing:
    return Thing(name, kind, str(info.get("name") or name).lower(), str(info.get("desc") or ""))


def _parse_quest(quest: Mapping[str, Any], logic: Logic) -> Quest:
    def events(key: str) -> tuple[tuple[Atom, ...], ...]:
        return tuple(
            tuple(logic.normal(_parse_atom(fact, {})) for fact in event["condition"]["preconditions"])
            for event in quest.get(key) or []
        )

    return Quest(
        int(quest.get("reward", 1)), events("win_events"), events("fail_events"), bool(quest.get("optional", False))
    )


class Playing:
    """A game being played."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.facts = game.facts
        self._types = {thing.id: thing.type for thing in game.things.values()}
        self._open_quests = list(game.quests)
        self.score = 0
        self.lost = False
        self._update_quests()

    @property
    def won(self) -> bool:
        return not self.lost and not any(quest.is_needed for quest in self._open_quests)

    @property
    def over(self) -> bool:
        return self.won or self.lost

    @property
    def room(self) -> str:
        return next(f.arguments[1] for f in self.facts if f.name == "at" and f.arguments[0] == PLAYER)

    def commands(self) -> dict[str, Action]:
        """List the possible actions by their commands, in alphabetical order."""
        found: dict[str, Action] = {}
        for action in self.game.logic.actions(self.facts, self._types):
            if action.rule.name in self.game.logic.commands:
                found.setdefault(self.command(action), action)
        return dict(sorted(found.items()))

    def command(self, action: Action) -> str:
        """Return the command of an action."""
        template = self.game.logic.commands[action.rule.name]
        for variable, thing in action.binding.items():
            template = template.replace(f"{{{variable}}}", self.game.things[thing].name)
        return template

    def do(self, action: Action) -> int:
        """Take an action that can be taken. Returns what it adds to the score."""
        before = self.score
        self.facts = action.apply(self.facts)
        self._update_quests()
        return self.score - before

    def _update_quests(self) -> None:
        for quest in list(self._open_quests):
            if any(self.holds(event) for event in quest.wins):
                self.score += quest.reward
                self._open_quests.remove(quest)
            elif any(self.holds(event) for event in quest.fails):
                self.lost = True

    def holds(self, facts: Sequence[Atom]) -> bool:
        """Return whether all of the facts hold."""
        return self.facts.issuperset(facts)
