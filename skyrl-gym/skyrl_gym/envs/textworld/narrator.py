"""Narrator: text of what a player of a game sees. Reads the state of a game and never changes it."""

import re
from collections.abc import Mapping

from skyrl_gym.envs.textworld.game import Playing, Thing
from skyrl_gym.envs.textworld.logic import INVENTORY, PLAYER, Action, Atom

STATES = ("open", "closed", "locked", "eaten")

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

_BRACKET = re.compile(r"\[([^\]]*)\]")


class Narrator:
    """Rooms and things in words: as their descriptions in the game say, and what those leave out."""

    def __init__(self, playing: Playing) -> None:
        self.playing = playing

    def after(self, action: Action, room_before: str) -> str:
        """Describe the result of an action that was taken in `room_before`."""
        rule = action.rule.name.partition("/")[0]
        if rule == "look" or self.playing.room != room_before:
            return self.room()
        if rule == "inventory":
            return self.inventory()
        if rule == "examine":
            return self.thing(self._get_object(action))
        done = f"You {self.playing.command(action)}."
        opened = [fact.bound(action.binding) for fact in action.rule.added if fact.name == "open"]
        contents = [self.contents("in", fact.arguments[0]) for fact in opened if self._is_container(fact.arguments[0])]
        return " ".join([done, *contents])

    def _get_object(self, action: Action) -> Thing:
        template = self.playing.game.logic.commands[action.rule.name]
        variable = next(v for v in action.binding if f"{{{v}}}" in template)
        return self._things[action.binding[variable]]

    @property
    def _things(self) -> Mapping[str, Thing]:
        return self.playing.game.things

    def room(self) -> str:
        """Describe the player's room."""
        room = self._things[self.playing.room]
        text = self._fill_description(room) if room.description else self._describe_plain_room(room)
        lying = [thing for thing in self._find_related("at", room.id) if self._is_portable(thing)]
        floor = [f"On the floor: {self._list(lying)}."] if lying else []
        return "\n".join([f"-= {room.name.title()} =-", text, *floor])

    def _describe_plain_room(self, room: Thing) -> str:
        sentences = []
        for thing in self._find_related("at", room.id):
            if thing.id != PLAYER and not self._is_portable(thing):
                sentences.append(
                    f"There is {_add_article(self._add_state(thing))}. {self._describe_contents(thing)}".strip()
                )
        for direction, neighbour in self._describe_neighbours(room.id):
            door = self._describe_door(room.id, neighbour)
            if door is not None:
                sentences.append(f"There is {_add_article(self._add_state(door))} leading {direction}.")
            elif self.playing.holds([Atom("free", (room.id, neighbour))]):
                sentences.append(f"There is an exit {direction}.")
        return " ".join(sentences)

    def _describe_neighbours(self, room: str) -> list[tuple[str, str]]:
        found = []
        for fact in self.playing.facts:
            direction = fact.name.removesuffix("_of")
            if direction in OPPOSITE and direction != fact.name and room in fact.arguments:
                there, here = fact.arguments
                found.append((direction, there) if here == room else (OPPOSITE[direction], here))
        return sorted(set(found))

    def _describe_door(self, room: str, neighbour: str) -> Thing | None:
        for fact in self.playing.facts:
            if fact.name == "link" and (fact.arguments[0], fact.arguments[-1]) == (room, neighbour):
                return self._things[fact.arguments[1]]
        return None

    def inventory(self) -> str:
        carried = self._find_related("in", INVENTORY)
        return f"You are carrying: {self._list(carried)}." if carried else "You are carrying nothing."

    def thing(self, thing: Thing) -> str:
        """Describe a thing that is examined."""
        text = self._fill_description(thing) or f"{_add_article(self._add_state(thing)).capitalize()}: nothing special."
        return f"{text} {self._describe_contents(thing)}".strip()

    def _describe_contents(self, thing: Thing) -> str:
        if self._is_container(thing.id):
            return self.contents("in", thing.id) if self._is(thing.id, "open") else ""
        return self.contents("on", thing.id) if self.playing.game.logic.is_a(thing.type, "s") else ""

    def contents(self, relation: str, place: str) -> str:
        """List the contents of a container or supporter."""
        things, name = self._find_related(relation, place), self._things[place].name
        where = f"{relation.capitalize()} the {name}: "
        return f"{where}{self._list(things)}." if things else f"{where}nothing."

    def _find_related(self, relation: str, place: str) -> list[Thing]:
        facts = [f for f in self.playing.facts if f.name == relation and f.arguments[-1] == place]
        return sorted((self._things[fact.arguments[0]] for fact in facts), key=lambda thing: thing.name)

    def _list(self, things: list[Thing]) -> str:
        return ", ".join(_add_article(thing.name) for thing in things)

    def _add_state(self, thing: Thing) -> str:
        states = [state for state in STATES if self._is(thing.id, state)]
        return " ".join([*states, thing.name])

    def _is(self, thing: str, state: str) -> bool:
        return self.playing.holds([Atom(state, (thing,))])

    def _is_container(self, thing: str) -> bool:
        return self.playing.game.logic.is_a(self._things[thing].type, "c")

    def _is_portable(self, thing: Thing) -> bool:
        return self.playing.game.logic.is_a(thing.type, "o")

    # Descriptions hold directions: [if c_0 is open] ... [otherwise] ... [end if], [a list of things on the s_0]

    def _fill_description(self, thing: Thing) -> str:
        """Return a thing's description with the directions in it followed."""
        shown: list[str] = []
        branches: list[str] = []  # of each open [if]: "active", "waiting" for a branch that is true, or "done"
        for number, part in enumerate(_BRACKET.split(thing.description)):
            if number % 2 == 0:
                shown += [part] if all(branch == "active" for branch in branches) else []
            elif part.startswith("if "):
                branches.append("active" if self._is_true(part[3:], thing) else "waiting")
            elif part.startswith(("else", "otherwise")) and branches:
                branches[-1] = self._pick_branch(branches[-1], part, thing)
            elif part == "end if" and branches:
                branches.pop()
            elif part.startswith("a list of things") and all(branch == "active" for branch in branches):
                shown.append(self._join_names(part))
        return re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", "".join(shown))).strip()

    def _pick_branch(self, branch: str, part: str, thing: Thing) -> str:
        if branch != "waiting":
            return "done"
        condition = part.partition(" if ")[2]
        return "active" if not condition or self._is_true(condition, thing) else "waiting"

    def _join_names(self, direction: str) -> str:
        *_, relation, place = direction.replace(" the ", " ").split()
        return self._list(self._find_related(relation, place))

    def _is_true(self, condition: str, thing: Thing) -> bool:
        return all(self._is_simply_true(part.replace("the ", "").split(), thing) for part in condition.split(" and "))

    def _is_simply_true(self, words: list[str], thing: Thing) -> bool:
        match words:
            case [state]:
                return self._is(thing.id, state)
            case [name, "is", state]:
                return self._is(name, state)
            case ["there", "is", amount, relation, place]:
                return bool(self._find_related(relation, place)) == (amount == "something")
            case [place, "contains", "nothing"]:
                return not self._find_related("in", place)
        return False


def _add_article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"
