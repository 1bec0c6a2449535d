"""Tasks about a fictional place, which require search, and the documents with the answers."""

from collections.abc import Sequence

from skyrl_gym.envs.base_text_env import ConversationType, Example

EXAMPLE_DOCUMENTS: Sequence[dict[str, object]] = (
    {
        "id": "orvane",
        "title": "Orvane",
        "text": "Orvane is an island republic in the Tessaly Sea. Its capital, Quillmere, lies at the mouth of the "
        "river Dathe and was founded in 1613 by the shipwright Ansel Brackwater.",
    },
    {
        "id": "lantern-house",
        "title": "Lantern House",
        "text": "Lantern House is a lighthouse north of Quillmere. It was designed by the engineer Mirela Tauben and "
        "first lit in 1847. Its lamp burned oil of the thornfish until 1902.",
    },
    {
        "id": "thornfish",
        "title": "Thornfish",
        "text": "The thornfish is a deep-water fish of the Tessaly Sea. Adults turn a deep violet before they spawn in "
        "the estuary of the Dathe.",
    },
    {
        "id": "tauben",
        "title": "Mirela Tauben",
        "text": "Mirela Tauben (1809-1881) was an engineer from the mountain village of Hask. She also built the "
        "Saltbridge, a stone aqueduct of forty-one arches.",
    },
    {
        "id": "kite-week",
        "title": "Kite Week",
        "text": "Kite Week is a festival held in Quillmere every October. Its winner is given a silver herring.",
    },
    {
        "id": "dathe",
        "title": "Dathe",
        "text": "The Dathe is the longest river of Orvane. It rises on Mount Pellory and is 212 kilometres long.",
    },
)

INSTRUCTION = (
    "Answer the question. Reason inside <think> and </think> first, and again after each piece of news. To look "
    "something up, write <search> query </search>; the documents found are shown to you between <information> and "
    "</information>. Search as often as you need. When you know, give the answer alone, without explanation, inside "
    "<answer> and </answer>."
)


def make_prompt(question: str) -> ConversationType:
    """Return the conversation that asks a question."""
    return [{"role": "user", "content": f"{INSTRUCTION} Question: {question}"}]


def make_examples() -> list[Example]:
    """One or two searches each, over `EXAMPLE_DOCUMENTS`."""
    return [
        _make_example("Who founded the capital of Orvane?", ["Orvane capital founded"], ["Ansel Brackwater"]),
        _make_example(
            "From which village did the designer of Lantern House come?", ["Lantern House", "Tauben"], ["Hask"]
        ),
        _make_example("What colour do adult thornfish turn?", ["thornfish colour"], ["deep violet", "violet"]),
        _make_example("How many arches has the Saltbridge?", ["Saltbridge aqueduct"], ["forty-one", "41"]),
        _make_example("What is the prize of Kite Week?", ["Kite Week winner"], ["a silver herring"]),
        _make_example("On which mountain does the longest river of Orvane rise?", ["longest river"], ["Mount Pellory"]),
    ]


def _make_example(question: str, queries: list[str], answers: list[str]) -> Example:
    searches = [f"<think>I look it up.</think><search> {query} </search>" for query in queries]
    return Example(
        prompt=make_prompt(question),
        extras={"reward_spec": {"method": "rule", "ground_truth": {"target": answers}}, "max_turns": len(queries) + 1},
        oracle=[*searches, f"<think>Now I know.</think><answer> {answers[0]} </answer>"],
    )
