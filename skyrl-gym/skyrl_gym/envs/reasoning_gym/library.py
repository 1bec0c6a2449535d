"""The generators of the reasoning-gym package (https://arxiv.org/abs/2505.24760): which there are, and their entries.

An entry is `{"question": str, "answer": str | None, "metadata": dict}`.

Most generators are a function of (settings, seed, index). Those in `PROCESS_DEPENDENT` also follow the order of a set
of strings or a global random state; their entries are made in a child process where both are fixed, so that here too
the same seed is the same entry in every process.
"""

import contextlib
import dataclasses
import functools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.deadline import outcome_of
from skyrl_gym.envs.base_text_env import mapping_of
from skyrl_gym.error import Error, InfraError, TaskError
from skyrl_gym.suggestions import did_you_mean

Entry = dict[str, Any]

PROCESS_DEPENDENT = frozenset(
    {
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "pool_matrix",
        "ransom_note",
        "word_ladder",
    }
)

MAX_ATTEMPTS = 8
ATTEMPT_STRIDE = 100_000_007

CHILD_START_SECONDS = 60.0
CHILD_SECONDS_PER_ENTRY = 60.0

_generating = threading.Lock()


@dataclass(frozen=True)
class EntryRequest:
    """Key of an entry: the `index`-th that the generator makes from these settings and this seed."""

    dataset: str
    seed: int
    index: int
    config: Mapping[str, object] = field(default_factory=dict)


def library() -> Any:
    """Return the reasoning_gym package. Raises Error if it is not installed."""
    try:
        import reasoning_gym.factory
    except ImportError as missing:
        raise Error("reasoning-gym is not installed: pip install 'skyrl-gym[reasoning-gym]'") from missing
    return reasoning_gym


def list_dataset_names() -> list[str]:
    """Return all generators, sorted. The package's `composite` is not one: `reasoning_gym_rows` mixes."""
    return sorted(name for name in library().factory.DATASETS if name != "composite")


def check_name(name: str) -> str:
    """Return the name. Raises TaskError, with the nearest names, for an unknown generator."""
    names = list_dataset_names()
    if name not in names:
        hint = did_you_mean(name, names, count=3)
        raise TaskError(f"dataset must be a generator of reasoning-gym; got {name!r}; {hint}")
    return name


def check_config(name: str, config: object) -> dict[str, object]:
    """Settings of a generator as a dict, from a mapping, its JSON text, or None.

    A value None means the generator's default, because a column of mappings comes back from parquet with every key.

    Raises:
        TaskError: not a mapping, a setting that the generator does not have, or a value that it refuses.
    """
    config = mapping_of("dataset_config", config)
    config = {key: value for key, value in config.items() if value is not None}
    config_class = library().factory.DATASETS[check_name(name)][1]
    known = [setting.name for setting in dataclasses.fields(config_class)]
    for key in config:
        if key not in known:
            hint = did_you_mean(key, known)
            raise TaskError(f"dataset_config of {name} has no setting {key!r}; {hint}")
    settings = outcome_of(config_class, **config)
    refusal = settings if isinstance(settings, Exception) else outcome_of(getattr(settings, "validate", lambda: None))
    if isinstance(refusal, Exception):
        raise TaskError(f"dataset_config of {name} is invalid: {refusal}; got {config}") from refusal
    return config


def find_system_prompt(text_or_name: str) -> str:
    """reasoning-gym's own system prompt of that name, else the text itself."""
    library()
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return SYSTEM_PROMPTS.get(text_or_name, text_or_name)


def generator(name: str, config: Mapping[str, object]) -> Any:
    """Return the generator object of these settings (checked before). Shared between threads, so only read from it."""
    return _make_generator(name, json.dumps(dict(config), sort_keys=True))


@functools.lru_cache(maxsize=128)
def _make_generator(name: str, config_json: str) -> Any:
    return library().create_dataset(name, **json.loads(config_json))


def generate(requests: Sequence[EntryRequest]) -> list[Entry]:
    """Return the entries asked for, in order.

    Raises:
        TaskError: a generator or its settings are not right, or it cannot make that entry.
        InfraError: the child process failed.
    """
    for request in requests:
        check_config(request.dataset, request.config)
    entries: dict[int, Entry] = {}
    # Entries of these generators depend on the hash seed of the process: a child with hash seed 0 makes them.
    elsewhere = [i for i, request in enumerate(requests) if request.dataset in PROCESS_DEPENDENT]
    if elsewhere:
        entries |= zip(elsewhere, _generate_in_child([requests[i] for i in elsewhere]), strict=True)
    with _generating:  # some generators are not thread-safe
        return [entries[i] if i in entries else _make_entry(request) for i, request in enumerate(requests)]


def _make_entry(request: EntryRequest) -> Entry:
    """Generate the entry. If the generator fails, as some occasionally do, use another, distant seed."""
    # Some generators refuse an index beyond `size`.
    config = {"size": max(500, request.index + 1)} | dict(request.config)
    # Further seeds are far apart: generators add the index to the seed, so near ones would repeat other entries.
    failures = []
    for attempt in range(MAX_ATTEMPTS):
        settings = config | {"seed": request.seed + attempt * ATTEMPT_STRIDE}
        entry = outcome_of(lambda settings=settings: generator(request.dataset, settings)[request.index])
        if not isinstance(entry, Exception):
            return entry
        failures.append(entry)
    raise TaskError(f"{request.dataset} could not generate entry {request.index} with {config}: {failures[0]!r}")


def _generate_in_child(requests: Sequence[EntryRequest]) -> list[Entry]:
    seconds = CHILD_START_SECONDS + CHILD_SECONDS_PER_ENTRY * len(requests)
    try:
        child = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as library; library.serve_requests()"],
            input=json.dumps([dataclasses.asdict(request) for request in requests]),
            env=os.environ | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"reasoning-gym did not generate {len(requests)} entries within {seconds:.0f} s") from None
    if child.returncode != 0:
        raise InfraError(f"reasoning-gym failed in its child process:\n{child.stderr[-2000:]}")
    return json.loads(child.stdout)


def serve_requests() -> None:
    """Run the child process: answer the requests on stdin with entries, as JSON on stdout."""
    entries = []
    with contextlib.redirect_stdout(sys.stderr):  # some generators print
        for fields in json.load(sys.stdin):
            request = EntryRequest(**fields)
            random.seed(f"{request.dataset}:{request.seed}:{request.index}")
            entries.append(_make_entry(request))
    json.dump(entries, sys.stdout)


def check_entry(name: str, value: object) -> Entry:
    """Parse an entry in a dataset row, a mapping or its JSON text. Raises TaskError that names the missing field."""
    entry = mapping_of("entry", value)
    for key in ("question", "answer", "metadata"):
        if key not in entry:
            raise TaskError(f"entry must have question, answer and metadata; {key} is missing, got {', '.join(entry)}")
    if not isinstance(entry["metadata"], Mapping):
        raise TaskError(f"entry.metadata must be a mapping; got {entry['metadata']!r:.200}")
    metadata = dict(entry["metadata"])
    if name in ("arc_agi", "rearc"):  # they compare boards as tuples, which JSON does not have
        metadata |= {key: tuple(map(tuple, metadata[key])) for key in ("input", "output") if key in metadata}
    return entry | {"metadata": metadata}


ORACLE_KEYS = ("possible_answer", "example_answer", "example_correct_answer")


def get_oracle_answer(entry: Entry) -> str | None:
    """Return a right answer to an entry: its own, or the example that a generator without a single answer keeps.

    None for `boxnet` and `rush_hour`, which keep none.
    """
    if entry["answer"] is not None:
        return str(entry["answer"])
    for key in ORACLE_KEYS:
        answer = entry["metadata"].get(key)
        if answer is not None:
            return answer if isinstance(answer, str) else json.dumps(answer)
    return None
