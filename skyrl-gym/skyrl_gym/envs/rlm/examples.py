"""Questions about contexts made by a program, too long to be worth reading, with the code that answers them."""

import json
import random
from typing import Any

from skyrl_gym.envs.base_text_env import Example

CITIES = ("Lisbon", "Oslo", "Quito", "Hanoi", "Tunis", "Perth", "Turin", "Kyoto", "Accra", "Lima")
GOODS = ("copper", "barley", "indigo", "timber", "salt", "amber", "wool", "cobalt")


def examples() -> list[Example]:
    return [
        _make_needle_example(1, "the harbour office"),
        _make_needle_example(2, "the observatory"),
        _make_counting_example(3),
        _make_chain_example(4),
        _make_total_example(5),
    ]


def ledger(seed: int, num_lines: int = 4000) -> list[dict[str, Any]]:
    """Make shipments, deterministic for a seed."""
    draw = random.Random(seed)
    return [
        {"number": number, "city": draw.choice(CITIES), "good": draw.choice(GOODS), "crates": draw.randint(1, 999)}
        for number in range(num_lines)
    ]


def _make_lines(shipments: list[dict[str, object]]) -> list[str]:
    return [f"Shipment {s['number']}: {s['crates']} crates of {s['good']} for {s['city']}." for s in shipments]


def _make_needle_example(seed: int, place: str) -> Example:
    """Make an example with one sentence among thousands, found in the first turn by code that also answers."""
    draw = random.Random(seed)
    secret = f"{draw.choice(CITIES)}-{draw.randint(10**6, 10**7 - 1)}"
    lines = _make_lines(ledger(seed))
    lines.insert(draw.randrange(len(lines)), f"The password of {place} is {secret}.")
    code = (
        f"start = context.index('The password of {place} is ')\n"
        "sentence = context[start:].splitlines()[0]\n"
        "answer = sentence.split()[-1].rstrip('.')\n"
        "FINAL_VAR('answer')"
    )
    return _make_example(f"What is the password of {place}?", "\n".join(lines), secret, [_format_block(code)])


def _make_counting_example(seed: int) -> Example:
    """Make an example of counting over all lines; a separate turn names the variable with the answer."""
    shipments = ledger(seed)
    crates: dict[str, int] = {}
    for shipment in shipments:
        pair = f"{shipment['good']} {shipment['city']}"
        crates[pair] = crates.get(pair, 0) + shipment["crates"]
    best = max(crates, key=lambda pair: crates[pair])
    code = (
        "totals = {}\n"
        "for line in context.splitlines():\n"
        "    words = line.rstrip('.').split()\n"
        "    pair = words[5] + ' ' + words[7]\n"
        "    totals[pair] = totals.get(pair, 0) + int(words[2])\n"
        "best = max(totals, key=totals.get)\n"
        "print(best, totals[best])"
    )
    question = "Which good went to which city in the most crates, all its shipments together? Answer as: good city"
    return _make_example(question, "\n".join(_make_lines(shipments)), best, [_format_block(code), "FINAL_VAR(best)"])


def _make_chain_example(seed: int) -> Example:
    """Make an example with a JSON object, so that the context is a dict; each entry names the next."""
    draw = random.Random(seed)
    names = [f"node-{number}" for number in draw.sample(range(10**5, 10**6), 2000)]
    context = {name: {"next": after} for name, after in zip(names, [*names[1:], None], strict=True)}
    shuffled = dict(sorted(context.items()))
    code = (
        f"here = {names[0]!r}\n"
        "while context[here]['next'] is not None:\n"
        "    here = context[here]['next']\n"
        "FINAL_VAR('here')"
    )
    question = f"Each entry names the next one. Beginning at {names[0]}, which is the last?"
    return _make_example(question, json.dumps(shuffled), names[-1], [_format_block(code)])


def _make_total_example(seed: int) -> Example:
    """Make an example whose turns inspect, count, and then state the answer as text."""
    shipments = ledger(seed)
    total = sum(s["crates"] for s in shipments if s["good"] == "amber" and s["city"] == "Lima")
    code = (
        "import re\n"
        "found = re.findall(r'(\\d+) crates of amber for Lima', context)\n"
        "print(len(found), sum(map(int, found)))"
    )
    return _make_example(
        "How many crates of amber went to Lima in all? Answer with the number.",
        "\n".join(_make_lines(shipments)),
        str(total),
        [_format_block("print(context[:300])"), _format_block(code), f"The shipments add up.\nFINAL({total})"],
    )


def _format_block(code: str) -> str:
    return f"```repl\n{code}\n```"


def _make_example(question: str, context: str, answer: str, oracle: list[str]) -> Example:
    columns = {"data_source": "rlm_ledger", "extra_info": {"context_text": context}}
    return Example.ruled(question, answer, *oracle, **columns)
