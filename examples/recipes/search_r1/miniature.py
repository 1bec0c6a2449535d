"""Miniature of Search-R1: with two turns (one search and the answer) a tiny model learns only one-hop questions; a
third turn adds two-hop questions.

    python examples/recipes/search_r1/miniature.py [--seeds 0 1 2] [--steps 20] [--jobs 2] [--output FOLDER]

A generated corpus of works, people, towns and rivers is served by the project's retrieval server (BM25) on the
loopback; the environment is `search`. A model of 0.14 million parameters is warmed up on demonstrations that mostly
give up or stop early, then trained by the scripts `run_qwen2.5_3b_2_turns.sh` and `run_qwen2.5_3b_3_turns.sh`. Seeds
are of data and sampling. A run that is complete in `--output` is not repeated.
"""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from growing_message import Demonstration, phrase_tokenizer, prepare_model
from miniatures import REPOSITORY, Difference, Metrics, argument_parser, draw_curves, last_value, markdown_table, train

import skyrl_gym
from skyrl_gym.tools.retrieval import RetrievalServer

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "run_qwen2.5_3b_3_turns.sh"
BUILDER = REPOSITORY / "examples" / "search" / "searchr1_dataset.py"
SYSTEM = "You are a helpful and harmless assistant."
INSTRUCTION = "Answer the question between <answer> and </answer>. Search with <search> query </search>. Question: "
ONE_HOP, TWO_HOPS = "searchR1_one_hop", "searchR1_two_hops"

SETTINGS = [
    "trainer.train_batch_size=24",
    "trainer.policy_mini_batch_size=12",
    "trainer.micro_forward_batch_size_per_gpu=60",
    "trainer.micro_train_batch_size_per_gpu=60",
    "trainer.policy.optimizer_config.lr=4e-4",
    "trainer.policy.optimizer_config.num_warmup_steps=6",
    "trainer.ref.fsdp_config.cpu_offload=false",
    "trainer.eval_before_train=true",
    "trainer.eval_interval=5",
    "trainer.max_prompt_length=64",
    "generator.max_input_length=400",
    "generator.sampling_params.max_generate_length=24",
    "generator.eval_sampling_params.max_generate_length=24",
]
"""Sizes in place of the published ones."""


# ---- the world: four kinds of things, each with a name of three words, and one relation from each to the next


@dataclass(frozen=True)
class Relation:
    """A relation of one kind of thing to another: its sentence in the corpus, and questions of one and of two hops."""

    subject: str
    object: str
    sentence: str
    question: str
    two_hops: str
    """Question for the object of this relation of the object of the relation before; "" if there is none."""


RELATIONS = {
    "work": Relation("work", "person", " was written by ", "Who wrote ", ""),
    "person": Relation("person", "town", " was born in ", "Where was born ", "Where was born the author of "),
    "town": Relation(
        "town", "river", " lies on the river ", "On which river lies ", "On which river lies the birthplace of "
    ),
}
NUM_TRAINING, NUM_EVALUATION = 900, 80
"""Questions of a seed for each number of hops."""
NUMBERS = {"work": 900, "person": 900, "town": 600, "river": 200}
WORDS_OF_A_PLACE = 10
"""Words that a name's first, second and third word is one of, for each kind: few enough for a tiny model to copy."""
FIRST = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
LAST = ["da", "go", "ku", "lem", "mor", "nex", "pol", "rit", "sta", "tov", "vin", "zar"]


def words(number: int) -> list[str]:
    """Return distinct words of two syllables, the same each time."""
    made = [f"{first}{vowel}{last}" for first, vowel, last in product(FIRST, "aeiou", LAST)]
    random.Random(0).shuffle(made)
    return [word.capitalize() for word in made[:number]]


@dataclass(frozen=True)
class World:
    """Names of each kind, and the object of each subject's relation."""

    names: dict[str, list[str]]
    object_of: dict[str, str]
    kind_of: dict[str, str]

    def documents(self) -> list[dict[str, object]]:
        return [
            {"id": name, "title": name, "text": f"{name}{RELATIONS[kind].sentence}{self.object_of[name]}."}
            for kind in RELATIONS
            for name in self.names[kind]
        ]


@cache
def world() -> World:
    """Return the world, the same for all seeds."""
    draw = random.Random(1)
    vocabulary = iter(words(3 * WORDS_OF_A_PLACE * len(NUMBERS)))
    names: dict[str, list[str]] = {}
    for kind, number in NUMBERS.items():
        places = [list(islice(vocabulary, WORDS_OF_A_PLACE)) for _ in range(3)]
        names[kind] = draw.sample([" ".join(name) for name in product(*places)], number)
    object_of = {
        name: draw.choice(names[relation.object]) for kind, relation in RELATIONS.items() for name in names[kind]
    }
    return World(names, object_of, {name: kind for kind, own in names.items() for name in own})


@dataclass(frozen=True)
class Question:
    """A question about `subject`, and what searches find: of two hops, the object of the object is asked for."""

    subject: str
    hops: int

    @property
    def chain(self) -> list[str]:
        """Objects on the way; the last one is the answer."""
        found = [self.subject]
        for _ in range(self.hops):
            found.append(world().object_of[found[-1]])
        return found[1:]

    @property
    def text(self) -> str:
        kind = world().kind_of[self.subject]
        if self.hops == 1:
            return f"{RELATIONS[kind].question}{self.subject}?"
        return f"{RELATIONS[RELATIONS[kind].object].two_hops}{self.subject}?"

    @property
    def row(self) -> dict[str, object]:
        return {
            "question": self.text,
            "golden_answers": self.chain[-1:],
            "data_source": "one_hop" if self.hops == 1 else "two_hops",
            "prompt": [{"role": "user", "content": INSTRUCTION + self.text}],
        }

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The messages that the builder of the recipe's data makes of `row`."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": INSTRUCTION + self.text}]


@cache
def questions() -> tuple[list[Question], list[Question]]:
    """Return the questions to train on and those to evaluate on: one of eight subjects is for evaluation only."""
    every = [
        Question(name, hops)
        for kind in RELATIONS
        for hops in (1, 2)
        if hops == 1 or RELATIONS[kind].object in RELATIONS
        for name in world().names[kind]
    ]
    draw = random.Random(2)
    draw.shuffle(every)
    held_out = set(islice(draw.sample(sorted(world().kind_of), len(world().kind_of)), len(world().kind_of) // 8))
    training = [question for question in every if question.subject not in held_out]
    evaluation = [question for question in every if question.subject in held_out]
    return training, evaluation


# ---- demonstrations


SEARCH, GUESS, KNOWN, NOBODY_KNOWS = "I look it up.", "I give up.", "I know.", "unknown"


def say(thought: str, tag: str, text: str) -> tuple[str, bool]:
    return f"<think>{thought}</think><{tag}>{text}</{tag}>", True


class Demonstrations:
    """Ways to answer a question, most of them wrong.

    First turn: give up (11 of 20), search for the subject (8), or for somebody else (1). After a search: give up (1),
    answer with what the first document says (6 of 10 for one hop, 3 for two), or search for that (3, 6) and answer with
    what the second search found (8) or the first (2).
    """

    def __init__(self, search_url: str, seen: dict[str, str]) -> None:
        self.search_url = search_url
        self.seen = seen
        self.questions = {hops: [question for question in questions()[0] if question.hops == hops] for hops in (1, 2)}

    def observation(self, query: str) -> tuple[str, bool]:
        """Return what the environment shows for a query; each is searched once."""
        if query not in self.seen:
            extras = {"reward_spec": {"ground_truth": {"target": ["-"]}}, "max_turns": 2}
            env = skyrl_gym.make("search", env_config={"search_url": self.search_url}, extras=extras)
            self.seen[query] = env.step(f"<search>{query}</search>")["observations"][0]["content"]
        return self.seen[query], False

    def __call__(self, draw: random.Random) -> Demonstration:
        hops = draw.choice((1, 2))
        question = draw.choice(self.questions[hops])
        return Demonstration(question.prompt, self._pieces(question, draw))

    def _pieces(self, question: Question, draw: random.Random) -> list[tuple[str, bool]]:
        guess = say(GUESS, "answer", NOBODY_KNOWS)
        way = draw.random()
        if way < 0.55:
            return [guess]
        query = question.subject if way < 0.95 else draw.choice(world().names["person"])
        pieces = [say(SEARCH, "search", query), self.observation(query)]
        found = world().object_of[query]
        way = draw.random()
        if way < 0.1:
            return [*pieces, guess]
        if way < (0.7 if question.hops == 1 else 0.4) or found not in world().object_of:
            return [*pieces, say(KNOWN, "answer", found)]
        pieces += [say(SEARCH, "search", found), self.observation(found)]
        return [*pieces, say(KNOWN, "answer", world().object_of[found] if draw.random() < 0.8 else found)]


def tokenizer_phrases() -> list[str]:
    frame = [
        '\n<information>{"result": "Doc 1: \\"',
        '\\"\\n',
        '\\nDoc 2: \\"',
        '\\nDoc 3: \\"',
        '\\n"}</information>\n',
    ]
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "answer") for slash in ("", "/")]
    relations = [text for r in RELATIONS.values() for text in (r.sentence, r.question, r.two_hops) if text]
    both = [part for name in world().kind_of for part in _parts(name)]
    return [SYSTEM, INSTRUCTION, *frame, *tags, *relations, SEARCH, GUESS, KNOWN, NOBODY_KNOWS, *both, "\n"]


def _parts(name: str) -> list[str]:
    first, *others = name.split()
    return [first, *(f" {other}" for other in others)]


# ---- runs


def prepare_data(folder: Path, seed: int) -> None:
    """Write questions of a seed by the recipe's builder, unless the folder has them."""
    if (folder / "validation.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    training, evaluation = questions()
    draw = random.Random(seed)
    held_out = [draw.sample([q for q in evaluation if q.hops == hops], NUM_EVALUATION) for hops in (1, 2)]
    shown = [draw.sample([q for q in training if q.hops == hops], NUM_TRAINING) for hops in (1, 2)]
    rows = {"train": [*chain(*shown)], "test": [*chain(*held_out)]}
    files = [folder / f"{split}.jsonl" for split in rows]
    for file, own in zip(files, rows.values(), strict=True):
        file.write_text("".join(json.dumps(question.row) + "\n" for question in own))
    command = [sys.executable, str(BUILDER), "--output_dir", str(folder), "--input", *map(str, files)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def train_arm(folder: Path, seed: int, turns: int, server: RetrievalServer, steps: int) -> Metrics:
    script = HERE / f"run_qwen2.5_3b_{turns}_turns.sh"
    variables = {"MODEL": str(folder.parent / "model"), "DATA_DIR": str(folder / "data"), "SEARCH_URL": server.url}
    # The address is that of this start of the server: a variable, so that it is no part of what a run is known by.
    return train(script, folder / f"{turns}_turns", [*SETTINGS, f"trainer.seed={seed}"], variables, steps)


def report(runs: dict[int, list[Metrics]], seeds: Sequence[int]) -> str:
    """Return the tables: exact match of every run, and differences of the arms over seeds."""
    sources = {ONE_HOP: "one hop", TWO_HOPS: "two hops"}
    heads = ["turns", "seed", *(f"{name}, before" for name in sources.values()), *sources.values()]
    rows = []
    for turns, of_seeds in runs.items():
        for seed, metrics in zip(seeds, of_seeds, strict=True):
            before = [f"{metrics[0][f'eval/{source}/avg_score']:.3f}" for source in sources]
            after = [f"{last_value(metrics, f'eval/{source}/avg_score'):.3f}" for source in sources]
            rows.append([str(turns), str(seed), *before, *after])
    base, *others = runs
    differences = []
    for turns in others:
        for source, name in sources.items():
            metric = f"eval/{source}/avg_score"
            pairs = zip(runs[turns], runs[base], strict=True)
            difference = Difference(tuple(last_value(a, metric) - last_value(b, metric) for a, b in pairs))
            differences.append([f"{turns} turns - {base} turns", name, str(difference)])
    return "\n\n".join(
        [markdown_table(heads, rows), markdown_table(["difference", "questions", "mean [95 % interval]"], differences)]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, "search_r1", steps=20, warm_up_steps=400)
    parser.add_argument("--turns", nargs="+", type=int, default=[2, 3], help="arms")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args(argv)
    output = options.output.resolve()
    with RetrievalServer(world().documents()) as server, ThreadPoolExecutor(options.jobs) as pool:
        prepare_model(
            output / "model",
            phrase_tokenizer(tokenizer_phrases()),
            Demonstrations(server.url, {}),
            hidden_size=64,
            num_layers=2,
            seed=0,
            steps=options.warm_up_steps,
            batch_size=32,
            learning_rate=4e-3,
        )
        for seed in options.seeds:
            prepare_data(output / str(seed) / "data", seed)
        futures = {
            (turns, seed): pool.submit(train_arm, output / str(seed), seed, turns, server, options.steps)
            for seed, turns in product(options.seeds, options.turns)
        }
        runs = {turns: [futures[turns, seed].result() for seed in options.seeds] for turns in options.turns}
    panels = {f"eval/{source}/avg_score": name for source, name in ((ONE_HOP, "one hop"), (TWO_HOPS, "two hops"))}
    picture = draw_curves(output / "curves.png", panels, {f"{turns} turns": own for turns, own in runs.items()})
    print(f"\n{report(runs, options.seeds)}\n\npicture: {picture}")


if __name__ == "__main__":
    main()
