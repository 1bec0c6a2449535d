import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.error import Error, TaskError

pytest.importorskip("reasoning_gym", reason="needs skyrl-gym[reasoning-gym]")

from skyrl_gym.envs.reasoning_gym.curriculum import Source, build_config, get_attribute_levels, has_curriculum
from skyrl_gym.envs.reasoning_gym.env import ReasoningGymEnv
from skyrl_gym.envs.reasoning_gym.grading import FULL_SCORE, grade, last_answer
from skyrl_gym.envs.reasoning_gym.library import (
    EntryRequest,
    check_entry,
    generate,
    get_oracle_answer,
    list_dataset_names,
)
from skyrl_gym.envs.reasoning_gym.rows import reasoning_gym_rows
from skyrl_gym.graders.results import Invalid, Score

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file.*arcagi:ResourceWarning")  # the library's loader of ARC

QUICK = [
    "ab",
    "arc_agi",
    "chain_sum",
    "countdown",
    "graph_color",
    "maze",
    "n_queens",
    "propositional_logic",
    "rubiks_cube",
]
WITHOUT_ORACLE = {"boxnet", "rush_hour"}
"""Neither an answer nor an example of one is in their entries."""

FREE_FORM = {"figlet_font", "list_functions", "propositional_logic", "spell_backward"}
"""Generators that give part credit to short or matching guesses: a random guess may score above 0.05, but never
fully.
"""

CHAIN_SUM = {"question": "State the sum: 4 + 3 =", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}


def make(config: Any = None, **extras: Any) -> Any:
    return skyrl_gym.make("reasoning_gym", env_config=config, extras=extras)


def value(name, entry, answer):
    result = grade(name, {}, entry, f"<answer>{answer}</answer>")
    assert isinstance(result, Score | Invalid)
    return result.value if isinstance(result, Score) else 0.0


def oracle_scores_and_guesses_do_not(name, seed, count):
    entries = generate([EntryRequest(name, seed, index) for index in range(count)])
    for entry in entries:
        from_row = check_entry(name, json.dumps(entry))
        assert from_row["question"]
        oracle = get_oracle_answer(entry)
        if name in WITHOUT_ORACLE:
            assert oracle is None
        elif not (name == "intermediate_integration" and "Integral(" in str(oracle)):  # an answer that is no answer
            assert value(name, entry, oracle) >= FULL_SCORE, (name, oracle)
            assert value(name, from_row, oracle) >= FULL_SCORE, (name, oracle)
        for text in ("", "no tag", "<answer></answer>", "<answer>qqq</answer>", "<answer>nan</answer>"):
            result = grade(name, {}, from_row, text)
            guess = result.value if isinstance(result, Score) else 0.0
            assert guess < FULL_SCORE if name in FREE_FORM else guess <= 0.05, (name, text, guess)


@pytest.mark.parametrize("name", QUICK)
def test_correct_answers_score_one_and_guesses_near_zero(name):
    oracle_scores_and_guesses_do_not(name, seed=3, count=2)


@pytest.mark.full
@pytest.mark.parametrize("name", list_dataset_names())
def test_every_generator_scores_gold_one_and_guesses_near_zero(name):
    oracle_scores_and_guesses_do_not(name, seed=11, count=6)


def test_all_generators_are_there():
    names = list_dataset_names()
    assert len(names) >= 100
    assert "composite" not in names


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> no: <answer> 7\n</answer>", "7"),
        ("<answer><answer>7</answer>", "7"),
        ("<answer>7</answer> <answer>8", "7"),
        ("7", None),
        ("</answer>7<answer>", None),
    ],
)
def test_last_closed_answer_is_graded(text, answer):
    assert last_answer(text) == answer


def test_episode_from_precomputed_entry():
    env = make(entry=CHAIN_SUM)
    messages, _ = env.init([])
    assert messages == [{"role": "user", "content": "State the sum: 4 + 3 ="}]
    output = env.step("<answer>7.0</answer>")
    assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
    assert env.get_metrics() == {"outcome_reward": 1.0, "score": 1.0, "answered": True, "solved/chain_sum": 1.0}


def test_partial_credit_affects_reward_but_not_outcome():
    shaped, strict = make(entry=CHAIN_SUM), make({"strict": True}, entry=CHAIN_SUM)
    assert shaped.step("<answer>it is 7</answer>")["reward"] == pytest.approx(1 / 7)  # one of its seven characters
    assert strict.step("<answer>it is 7</answer>")["reward"] == 0.0
    assert shaped.get_metrics()["outcome_reward"] == strict.get_metrics()["outcome_reward"] == 0.0


def test_entry_from_seed_and_index_must_match_prompt():
    [entry] = generate([EntryRequest("chain_sum", seed=4, index=2, config={"max_terms": 3})])
    row = {"dataset": "chain_sum", "dataset_config": {"max_terms": 3}, "seed": 4, "index": 2}
    env = make(**row)
    env.init([{"role": "user", "content": f"Please: {entry['question']}"}])
    assert env.step(f"<answer>{entry['answer']}</answer>")["reward"] == 1.0
    with pytest.raises(TaskError, match="prompt"):
        make(**row).init([{"role": "user", "content": "What is 1 + 1?"}])


def test_system_prompt_is_added_when_missing():
    question = [{"role": "user", "content": "4 + 3?"}]
    messages, _ = make({"system_prompt": "direct"}, entry=CHAIN_SUM).init(question)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert "<answer>" in messages[0]["content"]
    assert make({"system_prompt": "Be brief."}, entry=CHAIN_SUM).init(messages)[0] == messages
    assert len(question) == 1


@pytest.mark.parametrize(
    "extras, text",
    [
        ({}, "dataset field is required"),
        ({"dataset": "chain_sun", "seed": 1}, "chain_sum"),
        ({"dataset": "composite", "seed": 1}, "dataset must be a generator"),
        ({"dataset": "chain_sum", "seed": 1, "dataset_config": {"max_term": 3}}, "max_terms"),
        ({"dataset": "chain_sum", "seed": 1, "dataset_config": {"min_terms": 0}}, "min_terms"),
        ({"dataset": "chain_sum", "seed": 1, "dataset_config": "{"}, "dataset_config"),
        ({"dataset": "chain_sum"}, "seed field is required"),
        ({"dataset": "chain_sum", "seed": 1, "index": -1}, "index must be"),
        ({"dataset": "chain_sum", "entry": {"question": "?", "answer": "1"}}, "metadata is missing"),
    ],
)
def test_invalid_row_error_names_field_and_rule(extras, text):
    with pytest.raises(TaskError, match=text):
        make(**extras)


def test_missing_package_error_names_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    for attempt in (lambda: make(entry=CHAIN_SUM), ReasoningGymEnv.examples):
        with pytest.raises(Error, match=r"pip install 'skyrl-gym\[reasoning-gym\]'"):
            attempt()


def test_none_settings_from_parquet_become_defaults():
    assert make(entry=CHAIN_SUM, dataset_config={"max_terms": 3, "min_rows": None}).dataset_config == {"max_terms": 3}


ATTACKS = [
    "__import__('pathlib').Path({path!r}).touch()",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "(lambda: open({path!r}, 'w'))()",
    'S(\'__import__("os").system("touch {path}")\')',
    "[x for x in [open({path!r}, 'w')]]",
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(
    "name",
    ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "simple_integration", "countdown", "puzzle24"],
)
def test_answer_is_never_executed(name, attack, tmp_path):
    target = tmp_path / "pwned"
    [entry] = generate([EntryRequest(name, seed=1, index=0)])
    assert value(name, entry, attack.format(path=str(target))) <= 0.01
    assert not target.exists()


@pytest.mark.parametrize(
    "name",
    ["simple_integration", "polynomial_multiplication", "countdown", "coin_flip", "puzzle24", "propositional_logic"],
)
@pytest.mark.parametrize(
    "bomb",
    [
        "9**9**9**9",
        "9**(99*99*99*99)",
        "(9**999)**999",
        "1e999999999",
        "¬(" * 9000 + "P" + ")" * 9000,
        "P ∧ " * 4000 + "P",
        "(" * 5000 + "1" + ")" * 5000,
        "9" * 100_000,
    ],
)
def test_unbounded_answer_is_rejected_fast(name, bomb):
    metadata = {
        "numbers": [1, 2],
        "target": 3,
        "variable": "x",
        "integrand": "2*x",
        "variables": ["P"],
        "premises": ["P"],
    }
    started = time.process_time()
    assert value(name, {"question": "", "answer": "x**2 + C", "metadata": metadata}, bomb) <= 0.05
    assert time.process_time() - started < 5


def test_integrals_are_graded_in_bounded_time():
    entry = {
        "question": "",
        "answer": "x**2*log(x)/2 - x**2/4 + C",
        "metadata": {"variable": "x", "integrand": "x*log(x)"},
    }
    for right in (entry["answer"], "(2*x**2*ln(x) - x**2)/4", "x*(x*log(x) - x/2)/2 + 5", "x**2*log(x*E)/2 - 3*x**2/4"):
        assert value("intermediate_integration", entry, right) == 1, right
    nested = "atan(" * 50 + "x" + ")" * 50
    hard = [
        "(sin(x) + cos(x) + x)**64",
        "exp(sin(exp(cos(log(x + 1)))))**8 / (x**2 + 1)**7 * tan(x)",
        nested,
        "x**x**x**x",
    ]
    for wrong in ("x*log(x)", "x**2*log(x)/2 - x**2/4 + C*x", "Integral(x*log(x), x)", "1/0", "x/0", *hard):
        started = time.process_time()
        assert value("intermediate_integration", entry, wrong) == 0, wrong
        assert time.process_time() - started < 2


@pytest.mark.full
def test_failed_generator_is_asked_for_another_entry():
    """Every second board of knight_swap at this level (about) has no puzzle that is short enough."""
    requests = [EntryRequest("knight_swap", 3, index, build_config("knight_swap", 1)) for index in range(2)]
    assert all(entry["answer"] for entry in generate(requests))


def test_lenient_full_scores_of_generators_are_corrected():
    halting = {"question": "", "answer": "True", "metadata": {}}
    assert value("game_of_life_halting", halting, "whatever") == 0
    assert value("game_of_life_halting", halting, "false") == 0
    assert value("game_of_life_halting", halting, "true") == 1
    make_24 = {"question": "", "answer": "4*6*(2-1)", "metadata": {"numbers": [4, 6, 2, 1]}}
    assert value("puzzle24", make_24, "6*4*(2-1)") == 1
    assert value("puzzle24", make_24, "8*3*(2-1)") == 0  # 24, but of other numbers
    no_such_day = {"question": "", "answer": "-1", "metadata": {"task": "recurring_event_day"}}
    assert value("calendar_arithmetic", no_such_day, "-1") == 1
    assert value("calendar_arithmetic", no_such_day, "5") == 0
    complex_sum = {"question": "", "answer": "1.0 + 2.0i", "metadata": {"result": [1.0, 2.0]}}
    assert value("complex_arithmetic", complex_sum, "1.0 + 2.0i") == 1
    assert value("complex_arithmetic", complex_sum, "nan") == 0


def test_mixture_has_requested_fractions_and_gradable_rows():
    sources = [Source("chain_sum", weight=3), Source("word_sorting", config={"max_words": 4}), "spell_backward"]
    rows = list(reasoning_gym_rows(sources, size=50, seed=1))
    counts = {
        name: sum(row["dataset"] == name for row in rows) for name in ("chain_sum", "word_sorting", "spell_backward")
    }
    assert counts == {"chain_sum": 30, "word_sorting": 10, "spell_backward": 10}
    assert len({row["entry"] for row in rows}) == 50
    for row in rows:
        assert row["prompt"][0]["role"] == "system"
        env = make(**{key: column for key, column in row.items() if key not in ("prompt", "env_class")})
        env.init(row["prompt"])
        assert env.step(f"<answer>{row['reward_spec']['ground_truth']}</answer>")["reward"] == 1.0


def test_rows_depend_only_on_seed():
    def rows(seed):
        return list(reasoning_gym_rows(["chain_sum", "base_conversion"], size=10, seed=seed))

    assert rows(1) == rows(1)
    assert not {row["entry"] for row in rows(1)} & {row["entry"] for row in rows(2)}


@pytest.mark.slow
def test_rows_are_identical_across_processes():
    """Generators that depend on the order of sets and on global random states are covered, too."""
    program = """if True:
        import json
        from skyrl_gym.envs.reasoning_gym.rows import reasoning_gym_rows
        names = ["word_ladder", "isomorphic_strings", "list_functions", "pool_matrix", "chain_sum", "ransom_note"]
        print(json.dumps(list(reasoning_gym_rows(names, size=24, seed=2))))
    """
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert len(json.loads(outputs[0])) == 24
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "sources, text",
    [
        ([], "at least one generator"),
        ([Source("chain_sum", weight=0)], "weight must be above 0"),
        (["chain_sums"], "chain_sum"),
        ([Source("chain_sum", level=99)], "chain_sum"),
        ([Source("chain_sum", level={"terms": 1})], "num_terms"),
        ([Source("chain_sum", level={"num_digits": 10})], "chain_sum.num_digits"),
        ([Source("acre", level=0)], "acre has no curriculum"),
    ],
)
def test_invalid_mixture_is_rejected(sources, text):
    with pytest.raises(TaskError, match=text):
        list(reasoning_gym_rows(sources, size=3, seed=0))


def test_levels_raise_difficulty():
    assert get_attribute_levels("chain_sum")["num_digits"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert build_config("chain_sum", 0) == {"max_terms": 2, "max_digits": 1}  # the rest is as by default
    assert build_config("chain_sum", 5) == {"max_terms": 7, "max_digits": 6}
    assert build_config("chain_sum", {"num_terms": 5, "num_digits": 2}) == {"max_terms": 7, "max_digits": 3}
    lengths = [
        sum(len(row["prompt"][0]["content"]) for row in rows)
        for rows in (
            reasoning_gym_rows([Source("chain_sum", level=level)], size=30, seed=0, system_prompt=None)
            for level in (0, 5, 10)
        )
    ]
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.full
@pytest.mark.parametrize("name", list_dataset_names())
def test_levels_of_every_curriculum_differ(name):
    if not has_curriculum(name):
        assert name in {"acre", "gsm_symbolic", "list_functions"}
        return
    configs = []
    for level in range(max(len(values) for values in get_attribute_levels(name).values())):
        with contextlib.suppress(TaskError):  # some generators refuse some of their curriculum's levels
            configs.append(json.dumps(build_config(name, level), sort_keys=True))
    assert len(set(configs)) >= 2


def test_level_rejected_by_generator_raises_task_error():
    with pytest.raises(TaskError, match="rotation must be in range"):
        build_config("caesar_cipher", 2)  # rotates by more letters than there are


def test_threads_get_identical_rows():
    requests = [EntryRequest(name, seed, 0) for name in ("chain_sum", "maze", "mini_sudoku") for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda request: generate([request])[0], requests)) == generate(requests)
