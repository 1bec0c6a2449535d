import gzip
import json
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.textworld.env import extract_last_command
from skyrl_gym.envs.textworld.game import Playing, parse_game
from skyrl_gym.envs.textworld.house import HOUSE_RULES, TASKS, build_house_game
from skyrl_gym.envs.textworld.logic import parse_logic
from skyrl_gym.envs.textworld.narrator import Narrator
from skyrl_gym.episode import run_episode
from skyrl_gym.error import TaskError


def make(config: Any = None, **extras: Any) -> Any:
    return skyrl_gym.make("textworld", env_config=config, extras={"game": build_house_game(0)} | extras)


def say(command: str) -> str:
    return f"<action>{command}</action>"


def seen(env, command: str) -> str:
    return env.step(say(command))["observations"][0]["content"]


def played(env, commands) -> Any:
    commands = iter(commands)
    return run_episode(env, [], lambda _: say(next(commands)))


@pytest.fixture(scope="module")
def published(test_data):
    """Games that others made, with rules, descriptions and recorded walk-throughs."""
    file = test_data / "agent_envs" / "textworld_games.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_recorded_walkthroughs_win_published_games(published):
    assert len(published) == 8
    for row in published:
        walkthrough = row["game"]["metadata"]["walkthrough"]
        env = make(game=json.dumps(row["game"]))
        result = played(env, walkthrough)
        assert (result.outcome_reward, len(result.rewards)) == (1.0, len(walkthrough)), row["name"]
        assert result.total_reward == pytest.approx(1.0)
        assert not result.truncated
        assert env.get_metrics()["illegal_commands"] == 0
        assert not any("[" in m["content"].partition("left")[2] for m in result.messages)


def test_walkthroughs_with_missing_move_do_not_win(published):
    game = published[0]["game"]
    walkthrough = game["metadata"]["walkthrough"]
    for left_out in range(len(walkthrough)):
        result = played(make(game=game, max_turns=8), [*walkthrough[:left_out], *walkthrough[left_out + 1 :]])
        assert result.outcome_reward == 0.0 and result.truncated


def test_published_room_descriptions_match_facts(published):
    env = make(game=published[0]["game"])
    [message], _ = env.init([])
    room = message["content"]
    assert "-= Bedroom =-" in room
    assert "You see a closed normal looking chest drawer" in room
    assert "There is a closed wooden door leading east." in room
    assert seen(env, "open antique trunk").startswith("You open antique trunk. In the antique trunk: an old key.")
    assert "The antique trunk contains an old key." in seen(env, "look")


def test_objective_can_be_hidden(published):
    game = published[0]["game"]
    [told], _ = make(game=game).init([])
    [untold], _ = make({"objective": False}, game=game).init([])
    assert game["objective"] in told["content"]
    assert game["objective"] not in untold["content"]


def test_admissible_commands_of_published_games_are_legal(published):
    import random

    for row in published[:3]:
        rng = random.Random(row["name"])
        env = make(game=row["game"], max_turns=60)
        env.init([])
        output: Any = {"done": False}
        while not output["done"]:
            commands = list(env.playing.commands())
            assert {"look", "inventory"} <= set(commands)
            output = env.step(say(rng.choice(commands)))
        assert env.get_metrics()["illegal_commands"] == 0


def test_house_is_described():
    [message], _ = make().init([{"role": "user", "content": "You are in a house."}])
    assert message["content"] == (
        "You are in a house.\n\n"
        "Put the apple on the bench in the garden. Do not eat it.\n\n"
        "Give one command in each turn, as <action>look</action>. Commands are: close [container], close [door], "
        "drop [object], eat [food], examine [door], examine [object], examine [thing], go east, go north, go south, "
        "go west, insert [object] into [container], inventory, lock [container] with [key], lock [door] with [key], "
        "look, open [container], open [door], put [object] on [supporter], take [object], "
        "take [object] from [container], take [object] from [supporter], unlock [container] with [key], "
        "unlock [door] with [key]. There are 50 turns.\n\n"
        "-= Hall =-\nThere is a locked chest. There is an exit east.\nOn the floor: a lamp."
    )


def test_player_actions_are_observed():
    env = make()
    assert seen(env, "take lamp") == "You take lamp.\n49 turns left."
    assert seen(env, "inventory") == "You are carrying: a lamp.\n48 turns left."
    kitchen = "-= Kitchen =-\nThere is a closed drawer. There is a table. On the table: an apple. "
    assert seen(env, "go east").startswith(kitchen)
    assert "There is a locked garden door leading north. There is an exit west." in seen(env, "look")
    assert seen(env, "open drawer").startswith("You open drawer. In the drawer: a brass key, a coin.")
    assert seen(env, "examine drawer").startswith(
        "An open drawer: nothing special. In the drawer: a brass key, a coin."
    )
    assert seen(env, "put lamp on table").startswith("You put lamp on table.")
    assert seen(env, "examine table").startswith("A table: nothing special. On the table: an apple, a lamp.")


@pytest.mark.parametrize(
    "text, answer",
    [
        ("I open the chest", "There is no <action>...</action>"),
        (say("dance"), "'dance' is not a command: commands begin with close, drop, eat"),
        (say(""), "'' is not a command"),
        (say("open chest"), "'open chest' cannot be done here and now"),  # it is locked
        (say("go north"), "'go north' cannot be done here and now"),
        (say("take apple from table"), "cannot be done here and now"),  # it is in another room
        (say("take lamp\ntake lamp"), "cannot be done here and now"),
        (say("[" * 10_000), "is not a command"),
    ],
)
def test_illegal_command_is_explained_and_changes_nothing(text, answer):
    env = make()
    facts = env.playing.facts
    output = env.step(text)
    content = output["observations"][0]["content"]
    assert answer in content
    assert "Nothing has changed.\n49 turns left." in content
    assert len(content) < 400
    assert (output["reward"], output["done"]) == (0.0, False)
    assert env.playing.facts == facts


def test_possible_commands_can_be_listed():
    env = make({"admissible_commands": True})
    [message], _ = env.init([])
    assert message["content"].endswith("You can: examine chest, examine lamp, go east, inventory, look, take lamp.")
    assert "You can: drop lamp, " in seen(env, "take lamp")


@pytest.mark.parametrize(
    "text, command",
    [
        ("<action>Take the lamp.</action>", "take lamp"),
        ("<action>go west</action> or rather <action> e </action>", "go east"),
        ("<action>north</action>", "go north"),
        ("<action>x chest</action>", "examine chest"),
        ("<action>i</action>", "inventory"),
        ("look", None),
    ],
)
def test_command_parsing(text, command):
    assert extract_last_command(text) == command


def test_failed_quest_ends_episode_without_reward():
    env = make()
    for command in ("go east", "take apple from table"):
        env.step(say(command))
    output = env.step(say("eat apple"))
    assert (output["reward"], output["done"], output["observations"]) == (0.0, True, [])
    assert "truncated" not in output
    assert env.get_metrics() == {"outcome_reward": 0.0, "lost": True, "turns": 3, "illegal_commands": 0, "score": 0.0}
    last = make(max_turns=1).step(say("look"))  # while the last turn ends it as cut short
    assert (last["done"], last["truncated"]) == (True, True)


def test_game_is_won_without_optional_quests():
    game = build_house_game(3)
    optional = {"reward": 3, "win_events": build_house_game(0)["quests"][0]["win_events"], "optional": True}
    result = played(make(game=game | {"quests": [*game["quests"], optional]}), TASKS[3][2])
    assert (result.outcome_reward, result.total_reward) == (1.0, 0.25)


def test_quests_are_rewarded_by_fraction_or_only_at_end(published):
    game = next(row["game"] for row in published if row["name"] == "tw-rewardsBalanced_goalBrief")
    dense, sparse = (played(make({"dense": d}, game=game), game["metadata"]["walkthrough"]) for d in (True, False))
    assert [reward for reward in dense.rewards if reward] == [0.25] * 4
    assert sparse.rewards == [0.0] * 11 + [1.0]


def test_game_from_file(tmp_path):
    file = tmp_path / "game.json"
    file.write_text(json.dumps(build_house_game(3)))
    env = skyrl_gym.make("textworld", extras={"game_file": str(file)})
    assert env.game.objective == "Hide the lamp in the drawer."  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match="game_file"):
        skyrl_gym.make("textworld", extras={"game_file": str(tmp_path / "nowhere.json")})


def without_wins(game):
    return game | {"quests": game["quests"][1:]}


@pytest.mark.parametrize(
    "game, text",
    [
        (None, "game field is required"),
        ("{", "game must be a mapping or its JSON text"),
        ([], "game must be a mapping or its JSON text"),
        ({"world": []}, "game.quests"),
        (build_house_game(0) | {"world": [{"name": "at"}]}, "game is not of TextWorld's format"),
        (build_house_game(0) | {"world": []}, "game.world"),
        (without_wins(build_house_game(0)), "game.quests"),
        (
            build_house_game(0) | {"KB": {"logic": "type t { rules { take :: at(P, r); } }"}},
            "must have the form 'name :: facts -> facts'",
        ),
        (
            build_house_game(0) | {"KB": {"logic": "type t { rules { fly :: at(P, r) -> at(P, s); } }"}},
            "unbound variables s",
        ),
        (build_house_game(0) | {"KB": {"logic": "rules { }"}}, "must consist of 'type NAME"),
        (build_house_game(0) | {"KB": {"logic": "type t { rules { take"}}, "ends within a statement"),
    ],
)
def test_unplayable_game_is_rejected(game, text):
    with pytest.raises(TaskError, match=text):
        make(game=game)


def test_rules_are_read_with_their_types_and_aliases():
    logic = parse_logic(HOUSE_RULES)
    assert logic.is_a("k", "t")
    assert not logic.is_a("k", "f")
    assert logic.commands["unlock/c"] == "unlock {c} with {k}"
    [rule] = [rule for rule in logic.rules if rule.name == "open/d"]
    assert [str(atom) for atom in rule.removed] == ["closed(d)"]
    assert [str(atom) for atom in rule.added] == ["open(d)", "free(r, r')", "free(r', r)"]
    typed = parse_logic(
        "type r { predicates { below(r, r') = above(r', r); } rules { fall :: below(a: r, b: r) -> up(a); } }"
    )
    assert [str(atom) for atom in typed.rules[0].conditions] == ["above(b, a)"]
    assert typed.rules[0].types == {"a": "r", "b": "r"}


def test_action_changes_only_facts_of_rule():
    playing = Playing(parse_game(build_house_game(0)))
    before = playing.facts
    playing.do(playing.commands()["take lamp"])
    assert {str(fact) for fact in before - playing.facts} == {"at(lamp, hall)"}
    assert {str(fact) for fact in playing.facts - before} == {"in(lamp, I)"}


def test_directions_in_descriptions_are_followed():
    text = (
        "A [if open]gaping[else if locked]barred[otherwise]shut[end if] chest"
        "[if chest is open and there is something in the chest]: [a list of things in the chest][end if]."
    )
    game = build_house_game(0) | {"infos": [["chest", {"id": "chest", "name": "chest", "desc": text}]]}
    env = make(game=game)
    assert seen(env, "examine chest").startswith("A barred chest.")
    for command in TASKS[0][2][:6]:
        env.step(say(command))
    narrator = Narrator(env.playing)
    assert narrator.thing(env.game.things["chest"]).startswith("A gaping chest: an iron key, a letter.")
    env.step(say("close chest"))
    assert narrator.thing(env.game.things["chest"]) == "A shut chest."


def test_episode_can_be_restarted():
    env = make()
    first, _ = env.init([])
    env.step(say("take lamp"))
    assert env.init([])[0] == first
    assert env.turns == 0
