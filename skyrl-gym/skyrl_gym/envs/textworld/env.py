"""Text adventures: rooms, containers, keys and food, with quests to fulfil, from JSON worlds in TextWorld's format."""

import re
from dataclasses import dataclass
from pathlib import Path

from skyrl_gym.envs.base_text_env import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Example,
    max_turns_of,
    required,
    typed_config,
    with_user_text,
)
from skyrl_gym.envs.textworld.game import Game, Playing, parse_game
from skyrl_gym.envs.textworld.house import TASKS, build_house_game
from skyrl_gym.envs.textworld.narrator import Narrator
from skyrl_gym.tags import last_tagged

DEFAULT_MAX_TURNS = 50


SHORT_FORMS = {
    **{"n": "go north", "s": "go south", "e": "go east", "w": "go west"},
    **{direction: f"go {direction}" for direction in ("north", "south", "east", "west")},
    **{"l": "look", "i": "inventory", "inv": "inventory"},
}


@dataclass
class TextWorldConfig:
    """Settings of `environment.skyrl_gym.textworld`."""

    admissible_commands: bool = False
    """List all commands that are possible now in each observation."""

    objective: bool = True
    """State the objective in the first message, if the game has one."""

    dense: bool = True
    """Reward each step with its share of the game's score. False: only the winning step is rewarded, with 1."""


class TextWorldEnv(BaseTextEnv):
    """The last `<action>...</action>` of each turn is one command, such as `take old key from chest drawer`.

    The dataset row gives `game` (the JSON object of a game's file, or its text) or `game_file` (its path), and may give
    `max_turns`. The game's own rules decide what a command does. A command that cannot be given is answered; it costs a
    turn and changes nothing. The episode ends when all quests are won, or when one is failed.

    Rewards add up to 1 if the game is won. `outcome_reward` is 1 for a game that is won, else 0.
    """

    config_class = TextWorldConfig

    def __init__(self, env_config: object = None, extras: dict[str, object] | None = None):
        super().__init__()
        extras = extras or {}
        self.config = typed_config(TextWorldConfig, env_config)
        self.game = _load_game(extras)
        self.max_turns = max_turns_of(extras, DEFAULT_MAX_TURNS)
        self._start()

    def _start(self) -> None:
        self.playing = Playing(self.game)
        self.narrator = Narrator(self.playing)
        self.turns = 0
        self.illegal_commands = 0

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, object]]:
        """Add the objective, the forms of commands and the first room to the last user message."""
        self._start()
        parts = [self.game.objective] if self.config.objective and self.game.objective else []
        parts += [self._format_instructions(), self.narrator.room() + self._format_admissible_commands()]
        return with_user_text(prompt, "\n\n".join(parts)), {}

    def _format_instructions(self) -> str:
        forms = ", ".join(self._format_command_forms())
        return (
            f"Give one command in each turn, as <action>look</action>. Commands are: {forms}. "
            f"There are {self.max_turns} turns."
        )

    def _format_command_forms(self) -> list[str]:
        """Commands with kinds for things: "open [container]"."""
        logic = self.game.logic
        forms = set()
        for rule in logic.rules:
            template = logic.commands.get(rule.name)
            if template is not None:
                forms.add(
                    re.sub(r"\{([^}]*)\}", lambda m, r=rule: f"[{logic.kinds.get(r.types[m[1]], 'thing')}]", template)
                )
        return sorted(forms)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        command = extract_last_command(action)
        possible = self.playing.commands()
        if command in possible:
            room = self.playing.room
            gained = self.playing.do(possible[command])
            text = self.narrator.after(possible[command], room)
            if gained:
                text += f"\nThe score is now {self.playing.score} of {self.game.max_score}."
        else:
            self.illegal_commands += 1
            gained, text = 0, self._format_refusal(command)
        done = self.playing.over or self.turns >= self.max_turns
        output = BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": self._add_turns_left(text)}],
            reward=self._reward(gained),
            done=done,
            metadata={"command": command, "score": self.playing.score},
        )
        if done and not self.playing.over:
            output["truncated"] = True
        return output

    def _format_refusal(self, command: str | None) -> str:
        if command is None:
            return "There is no <action>...</action> in what you wrote. Nothing has changed."
        verbs = {form.split()[0] for form in self._format_command_forms()}
        fault = "cannot be done here and now"
        if command.partition(" ")[0] not in verbs:
            fault = f"is not a command: commands begin with {', '.join(sorted(verbs))}"
        return f"{command[:80]!r} {fault}. Nothing has changed."

    def _add_turns_left(self, text: str) -> str:
        left = self.max_turns - self.turns
        return f"{text}{self._format_admissible_commands()}\n{left} turn{'' if left == 1 else 's'} left."

    def _format_admissible_commands(self) -> str:
        return f"\nYou can: {', '.join(self.playing.commands())}." if self.config.admissible_commands else ""

    def _reward(self, gained: int) -> float:
        if self.config.dense and self.game.max_score > 0:
            return gained / self.game.max_score
        return float(self.playing.won)

    def get_metrics(self) -> dict[str, object]:
        metrics: dict[str, object] = {
            "outcome_reward": float(self.playing.won),
            "lost": self.playing.lost,
            "turns": self.turns,
            "illegal_commands": self.illegal_commands,
        }
        return metrics | ({"score": self.playing.score / self.game.max_score} if self.game.max_score > 0 else {})

    @classmethod
    def examples(cls) -> list[Example]:
        prompt = [{"role": "user", "content": "You are in a house."}]
        games = [build_house_game(task) for task in range(len(TASKS))]
        return [
            Example(
                prompt=prompt,
                extras={"game": game, "max_turns": 20},
                oracle=[f"<action>{command}</action>" for command in game["metadata"]["walkthrough"]],
            )
            for game in games
        ]


def _load_game(extras: dict[str, object]) -> Game:
    if extras.get("game") is not None:
        return parse_game(extras["game"])
    path = Path(str(extras.get("game_file") or required(extras, "game")))
    if not path.is_file():
        raise FileNotFoundError(f"game_file: no file {path}")
    return parse_game(path.read_text(encoding="utf-8"))


def extract_last_command(text: str) -> str | None:
    """Return the last closed `<action>...</action>` as a command: lower case, no articles, short forms written out."""
    written = last_tagged(text, "action")
    if written is None:
        return None
    words = written.lower().strip(" \t\r\n.!>").split()
    if words and words[0] == "x":
        words[0] = "examine"
    command = " ".join(word for word in words if word not in ("the", "a", "an"))
    return SHORT_FORMS.get(command, command)
