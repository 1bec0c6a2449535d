"""Table of benchmark suites: published sets, the environment that plays them, and how models are asked.

Independent of files and the network: `suite_data` finds the tasks, `suite_runs` plays them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_gym.datasets.databases import DatabaseRowSettings, text2sql_row
from skyrl_gym.datasets.function_calls import bfcl_row
from skyrl_gym.datasets.mathematics import NewAimeRows, gsm8k_row, math_row
from skyrl_gym.datasets.problems import MakeRow
from skyrl_gym.datasets.programs import code_row, lcb_row
from skyrl_gym.datasets.questions import SearchRows
from skyrl_gym.error import Error
from skyrl_gym.suggestions import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One published set, and how it is played unless the user says otherwise."""

    title: str
    env: str
    """Registered id of the environment."""
    make_rows: Callable[[Mapping[str, object]], MakeRow]
    """Function of the environment's settings that makes a row function, which may remember earlier rows."""
    hub: str | None = None
    """`NAME[:CONFIG]@SPLIT` on the Hugging Face hub; None: the set is not there in a form that can be read."""
    file_names: tuple[str, ...] = ()
    """Other names that files of the set go by, besides the suite's."""
    data_source: str | None = None
    """Value of the column `data_source` of its rows, where a file holds several sets."""
    databases: str | None = None
    """Family of its databases, a key of `DATABASE_FOLDERS`: their folder is below the setting `db_path`."""
    file_below_databases: str | None = None
    """Path of the published file below `db_path`."""
    needs_retrieval: bool = False
    """A retrieval server must listen at the setting `search_url`."""
    env_config: Mapping[str, object] = field(default_factory=dict)
    """Settings of the environment."""
    num_samples: int = 1
    """Answers to each task."""
    k: int = 1
    """The k of pass@k, reported in addition to the mean over all samples."""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    """Maximum number of tokens per turn."""
    max_turns: int | None = None
    """Maximum number of turns; None: the environment's."""
    stop: tuple[str, ...] = ()


def _make_constant(make_row: MakeRow) -> Callable[[Mapping[str, object]], MakeRow]:
    return lambda env_config: make_row


def _make_aime_suite(title: str, hub: str, *file_names: str) -> Suite:
    """Make an AIME suite, with sampling as in DAPO's table (docs/recipes.md)."""
    return Suite(
        title=title,
        env="aime",
        make_rows=lambda env_config: NewAimeRows(),
        hub=hub,
        file_names=file_names,
        num_samples=32,
        k=32,
        temperature=1.0,
        top_p=0.7,
        max_tokens=8192,
    )


def _make_question_suite(title: str, data_source: str, *file_names: str) -> Suite:
    """Make a suite of one of the seven sets of Search-R1, which are published in one file."""
    return Suite(
        title=title,
        env="search",
        make_rows=lambda env_config: SearchRows(),
        hub="PeterJinGo/nq_hotpotqa_train@test",
        file_names=(data_source, *file_names),
        data_source=data_source,
        needs_retrieval=True,
        env_config={"topk": 3},
        max_tokens=500,
        max_turns=4,
        stop=("</search>", "</answer>"),
    )


def _make_spider_suite(
    title: str, data_source: str, databases: str, file: str, hub: str | None = None, question: str = "question"
) -> Suite:
    """Make a suite of one of the five Spider sets, compared by Spider's rule as in SkyRL-SQL's table."""

    def make_rows(env_config: Mapping[str, object]) -> MakeRow:
        settings = DatabaseRowSettings(
            data=databases,
            data_source=data_source,
            db_path=Path(str(env_config["db_path"])),
            question=question,
            keep_empty=True,  # every question counts in a published figure
        )
        return functools.partial(text2sql_row, settings=settings)

    return Suite(
        title=title,
        env="text2sql",
        make_rows=make_rows,
        hub=hub,
        data_source=data_source,
        databases=databases,
        file_below_databases=file,
        env_config={"rule": "spider"},
        max_tokens=3000,
        max_turns=5,
        stop=("</sql>", "</solution>"),
    )


def _make_function_call_suite(title: str, *file_names: str) -> Suite:
    return Suite(title=title, env="tool_call", make_rows=_make_constant(bfcl_row), file_names=file_names)


SUITES: dict[str, Suite] = {
    "aime24": _make_aime_suite("AIME 2024", "BytedTsinghua-SIA/AIME-2024@train", "aime2024"),
    "aime25": _make_aime_suite("AIME 2025", "math-ai/aime25@test", "aime2025"),
    "math500": Suite(
        title="MATH-500",
        env="math",
        make_rows=_make_constant(math_row),
        hub="HuggingFaceH4/MATH-500@test",
        num_samples=4,
        k=4,
        temperature=0.6,
        top_p=0.95,
        max_tokens=4096,
    ),
    "gsm8k": Suite(
        title="GSM8K",
        env="gsm8k",
        make_rows=_make_constant(gsm8k_row),
        hub="openai/gsm8k:main@test",
        max_tokens=1024,
    ),
    "nq": _make_question_suite("Natural Questions", "nq", "nqopen"),
    "triviaqa": _make_question_suite("TriviaQA", "triviaqa"),
    "popqa": _make_question_suite("PopQA", "popqa"),
    "hotpotqa": _make_question_suite("HotpotQA", "hotpotqa"),
    "2wiki": _make_question_suite("2WikiMultihopQA", "2wikimultihopqa"),
    "musique": _make_question_suite("MuSiQue", "musique"),
    "bamboogle": _make_question_suite("Bamboogle", "bamboogle"),
    "spider_dev": _make_spider_suite(
        "Spider dev", "spider_dev", "spider", "spider/dev.json", "xlangai/spider@validation"
    ),
    "spider_test": _make_spider_suite("Spider test", "spider_test", "spider_test", "spider/test.json"),
    "spider_realistic": _make_spider_suite(
        "Spider-Realistic", "spider_realistic", "spider", "spider-realistic/spider-realistic.json"
    ),
    "spider_dk": _make_spider_suite("Spider-DK", "spider_dk", "spider_dk", "Spider-DK/Spider-DK.json"),
    "spider_syn": _make_spider_suite(
        "Spider-Syn",
        "spider_syn",
        "spider",
        "Spider-Syn/Spider-Syn/dev.json",
        question="SpiderSynQuestion|syn_question",
    ),
    "humaneval": Suite(
        title="HumanEval",
        env="code",
        make_rows=_make_constant(code_row),
        hub="openai/openai_humaneval@test",
        max_tokens=1024,
    ),
    "mbpp": Suite(
        title="MBPP",
        env="code",
        make_rows=_make_constant(code_row),
        hub="google-research-datasets/mbpp:full@test",
        max_tokens=1024,
    ),
    "livecodebench": Suite(
        title="LiveCodeBench v5",
        env="lcb",
        make_rows=_make_constant(lcb_row),
        hub="agentica-org/DeepCoder-Preview-Dataset:lcbv5@test",
        file_names=("lcb", "lcbv5"),
        num_samples=10,
        k=10,
        temperature=0.2,
        top_p=0.95,
        max_tokens=4096,
    ),
    "bfcl_simple": _make_function_call_suite("BFCL, one function", "bfclv3simple", "bfclv4simplepython"),
    "bfcl_multiple": _make_function_call_suite("BFCL, several functions", "bfclv3multiple", "bfclv4multiple"),
    "bfcl_parallel": _make_function_call_suite("BFCL, several calls", "bfclv3parallel", "bfclv4parallel"),
    "bfcl_parallel_multiple": _make_function_call_suite(
        "BFCL, several calls of several functions", "bfclv3parallelmultiple", "bfclv4parallelmultiple"
    ),
    "bfcl_irrelevance": _make_function_call_suite("BFCL, no call expected", "bfclv3irrelevance", "bfclv4irrelevance"),
}

GROUPS: dict[str, tuple[str, ...]] = {
    "search_r1": ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"),
    "spider": ("spider_dev", "spider_test", "spider_realistic", "spider_dk", "spider_syn"),
    "bfcl": ("bfcl_simple", "bfcl_multiple", "bfcl_parallel", "bfcl_parallel_multiple", "bfcl_irrelevance"),
}
"""Names that stand for several suites, whose mean is reported besides."""

ELSEWHERE = {
    "swe_bench": "SWE-bench needs an agent that works in containers: `python -m skyrl_agent.evaluate "
    "examples/agent/swe/swe_bench.yaml ROWS` with rows created by examples/agent/data/swe_data.py "
    "(docs/agents.md)",
}
"""Sets that this command does not play, and what does."""


def get_suites(names: Sequence[str]) -> dict[str, Suite]:
    """Return the suites of names of suites and groups, each once.

    Raises:
        Error: a name is unknown, or of a set that another command plays.
    """
    chosen: dict[str, Suite] = {}
    for name in names:
        if name in ELSEWHERE:
            raise Error(f"--suite {name}: {ELSEWHERE[name]}")
        if name not in SUITES and name not in GROUPS:
            raise Error(f"--suite {name}: no such suite; {did_you_mean(name, [*SUITES, *GROUPS, *ELSEWHERE])}")
        chosen |= {each: SUITES[each] for each in GROUPS.get(name, (name,))}
    return chosen


def markdown() -> str:
    """Return the table of suites and the list of groups for the documentation."""
    lines = [
        "| suite | set | environment | samples/k | temperature/top_p | tokens/turn | turns | hub | needs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, suite in SUITES.items():
        sampling = f"{suite.num_samples}/{suite.k} | {suite.temperature:g}/{suite.top_p:g} | {suite.max_tokens}"
        needs = "`db_path`" if suite.databases else "`search_url`" if suite.needs_retrieval else ""
        hub = f"`{suite.hub}`" if suite.hub else ""
        lines.append(
            f"| `{name}` | {suite.title} | `{suite.env}` | {sampling} | {suite.max_turns or ''} | {hub} | {needs} |"
        )
    lines += ["", "| group | suites |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(f'`{each}`' for each in members)} |" for name, members in GROUPS.items()]
    return "\n".join(lines) + "\n"
