"""Default rules for worlds, and a small house with four tasks.

Types, predicates and rule names match TextWorld's games, so that worlds can be exchanged.
"""

from typing import Any

HOUSE_RULES = """
type t {  # a thing that can be looked at
    rules { examine/t :: at(P, r) & $at(t, r) -> at(P, r); }
    inform7 { type { kind :: "thing"; } commands { examine/t :: "examine {t}"; } }
}

type r {  # a room
    predicates {
        south_of(r, r') = north_of(r', r);
        east_of(r, r') = west_of(r', r);
    }
    rules {
        go/north :: at(P, r) & $north_of(r', r) & $free(r, r') & $free(r', r) -> at(P, r');
        go/south :: at(P, r) & $north_of(r, r') & $free(r, r') & $free(r', r) -> at(P, r');
        go/west :: at(P, r) & $west_of(r', r) & $free(r, r') & $free(r', r) -> at(P, r');
        go/east :: at(P, r) & $west_of(r, r') & $free(r, r') & $free(r', r) -> at(P, r');
    }
    inform7 {
        type { kind :: "room"; }
        commands {
            go/north :: "go north";
            go/south :: "go south";
            go/west :: "go west";
            go/east :: "go east";
        }
    }
}

type P {  # the player
    rules { look :: at(P, r) -> at(P, r); }
    inform7 { commands { look :: "look"; } }
}

type I {  # what the player carries
    rules {
        inventory :: at(P, r) -> at(P, r);
        take :: $at(P, r) & at(o, r) -> in(o, I);
        drop :: $at(P, r) & in(o, I) -> at(o, r);
        take/c :: $at(P, r) & $at(c, r) & $open(c) & in(o, c) -> in(o, I);
        insert :: $at(P, r) & $at(c, r) & $open(c) & in(o, I) -> in(o, c);
        take/s :: $at(P, r) & $at(s, r) & on(o, s) -> in(o, I);
        put :: $at(P, r) & $at(s, r) & in(o, I) -> on(o, s);
        examine/I :: in(o, I) -> in(o, I);
        examine/c :: at(P, r) & $at(c, r) & $open(c) & $in(o, c) -> at(P, r);
        examine/s :: at(P, r) & $at(s, r) & $on(o, s) -> at(P, r);
    }
    inform7 {
        commands {
            inventory :: "inventory";
            take :: "take {o}";
            drop :: "drop {o}";
            take/c :: "take {o} from {c}";
            insert :: "insert {o} into {c}";
            take/s :: "take {o} from {s}";
            put :: "put {o} on {s}";
            examine/I :: "examine {o}";
            examine/c :: "examine {o}";
            examine/s :: "examine {o}";
        }
    }
}

type s : t { inform7 { type { kind :: "supporter"; } } }

type o : t { inform7 { type { kind :: "object"; } } }

type k : o { inform7 { type { kind :: "key"; } } }

type f : o {
    rules { eat :: in(f, I) -> eaten(f); }
    inform7 { type { kind :: "food"; } commands { eat :: "eat {f}"; } }
}

type c : t {
    rules {
        open/c :: $at(P, r) & $at(c, r) & closed(c) -> open(c);
        close/c :: $at(P, r) & $at(c, r) & open(c) -> closed(c);
        unlock/c :: $at(P, r) & $at(c, r) & $in(k, I) & $match(k, c) & locked(c) -> closed(c);
        lock/c :: $at(P, r) & $at(c, r) & $in(k, I) & $match(k, c) & closed(c) -> locked(c);
    }
    inform7 {
        type { kind :: "container"; }
        commands {
            open/c :: "open {c}";
            close/c :: "close {c}";
            unlock/c :: "unlock {c} with {k}";
            lock/c :: "lock {c} with {k}";
        }
    }
}

type d : t {
    rules {
        open/d :: $at(P, r) & $link(r, d, r') & closed(d) -> open(d) & free(r, r') & free(r', r);
        close/d :: $at(P, r) & $link(r, d, r') & open(d) & free(r, r') & free(r', r) -> closed(d);
        unlock/d :: $at(P, r) & $link(r, d, r') & $in(k, I) & $match(k, d) & locked(d) -> closed(d);
        lock/d :: $at(P, r) & $link(r, d, r') & $in(k, I) & $match(k, d) & closed(d) -> locked(d);
        examine/d :: at(P, r) & $link(r, d, r') -> at(P, r);
    }
    inform7 {
        type { kind :: "door"; }
        commands {
            open/d :: "open {d}";
            close/d :: "close {d}";
            unlock/d :: "unlock {d} with {k}";
            lock/d :: "lock {d} with {k}";
            examine/d :: "examine {d}";
        }
    }
}
"""

THINGS = {
    "hall": "r",
    "kitchen": "r",
    "garden": "r",
    "garden door": "d",
    "chest": "c",
    "drawer": "c",
    "table": "s",
    "bench": "s",
    "brass key": "k",
    "iron key": "k",
    "apple": "f",
    "coin": "o",
    "letter": "o",
    "lamp": "o",
    "P": "P",
    "I": "I",
}

FACTS = """at P hall, at chest hall, locked chest, at lamp hall, in letter chest, in iron key chest,
west_of hall kitchen, free hall kitchen, free kitchen hall,
at drawer kitchen, closed drawer, in brass key drawer, in coin drawer, match brass key chest,
at table kitchen, on apple table, link kitchen garden door garden, link garden garden door kitchen, locked garden door,
match iron key garden door, north_of garden kitchen, at bench garden"""

OPEN_CHEST = [
    "go east",
    "open drawer",
    "take brass key from drawer",
    "go west",
    "unlock chest with brass key",
    "open chest",
]

TASKS: list[tuple[str, str, list[str]]] = [
    # (objective, fact to reach, commands that reach it)
    (
        "Put the apple on the bench in the garden. Do not eat it.",
        "on apple bench",
        [
            *OPEN_CHEST,
            *("take iron key from chest", "go east", "take apple from table", "unlock garden door with iron key"),
            *("open garden door", "go north", "put apple on bench"),
        ],
    ),
    (
        "Put the coin into the chest.",
        "in coin chest",
        ["go east", "open drawer", "take coin from drawer", *OPEN_CHEST[2:], "insert coin into chest"],
    ),
    (
        "Lay the letter on the table.",
        "on letter table",
        [*OPEN_CHEST, "take letter from chest", "go east", "put letter on table"],
    ),
    (
        "Hide the lamp in the drawer.",
        "in lamp drawer",
        ["take lamp", "go east", "open drawer", "insert lamp into drawer"],
    ),
]


def build_house_game(task: int) -> dict[str, Any]:
    """Return the house with one of the `TASKS`, as the JSON object of a game's file. Eating the apple loses."""
    objective, goal, walkthrough = TASKS[task]
    return {
        "world": [_parse_fact(text) for text in FACTS.replace("\n", " ").split(",")],
        "quests": [
            {"reward": 1, "win_events": [_make_event(goal)], "fail_events": []},
            {"reward": 0, "win_events": [], "fail_events": [_make_event("eaten apple")]},
        ],
        "objective": objective,
        "metadata": {"walkthrough": walkthrough},
    }


def _make_event(fact: str) -> dict[str, object]:
    return {"condition": {"preconditions": [_parse_fact(fact)]}}


def _parse_fact(text: str) -> dict[str, object]:
    """ "in iron key chest" as JSON. Names of two words are looked for first."""
    predicate, *words = text.split()
    arguments = []
    while words:
        length = 2 if " ".join(words[:2]) in THINGS else 1
        name = " ".join(words[:length])
        arguments.append({"name": name, "type": THINGS[name]})
        words = words[length:]
    return {"name": predicate, "arguments": arguments}
