"""Grading of text-to-SQL: a query is right if it gives the rows that the gold query gives (execution match)."""

import re
from contextlib import closing
from typing import Literal

from skyrl_gym.error import TaskError
from skyrl_gym.graders.results import Grade, InfraError, Invalid, Timeout, reward_of
from skyrl_gym.graders.sql_rows import compare_bags, compare_lists, compare_sets
from skyrl_gym.sandbox.sqlite import QueryError, QueryLimits, QueryTimeout, Row, read_rows

Rule = Literal["skyrl", "spider"]

QUERY_SECONDS = 30.0
MAX_GOLD_ROWS = 1_000_000

_OPEN, _CLOSE = "<solution>", "</solution>"
_THOUGHT_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)
_TAG_IN_SOLUTION = re.compile(r"</?(?:think|sql|observation)\b", re.IGNORECASE)
_OBSERVATION_END = re.compile(r"</observation>", re.IGNORECASE)
_ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)
_THOUGHT_BEGINS = re.compile(r"\s*<think>", re.IGNORECASE)


def verify_format_and_extract(output: str) -> tuple[bool, list[str] | None, str | None, None]:
    """Check the format of an episode and extract its thoughts and solution; `(False, None, None, None)` if it is wrong.

    There is one `<solution>` with its end, without a tag of another kind inside; at least one `<think>...</think>`; and
    a thought begins right after every observation before the solution. Never raises.
    """
    invalid = (False, None, None, None)
    if output.count(_OPEN) != 1:
        return invalid
    before, _, rest = output.partition(_OPEN)
    if rest.count(_CLOSE) != 1:
        return invalid
    solution = rest.partition(_CLOSE)[0]
    thoughts = _extract_thoughts(output)
    if _TAG_IN_SOLUTION.search(solution) or not thoughts:
        return invalid
    if not all(_THOUGHT_BEGINS.match(before, end.end()) for end in _OBSERVATION_END.finditer(before)):
        return invalid
    return True, thoughts, solution, None


def _extract_thoughts(text: str) -> list[str]:
    """Extract `<think>...</think>`; one regular expression would take quadratic time where ends are missing."""
    thoughts: list[str] = []
    start: int | None = None
    for tag in _THOUGHT_TAG.finditer(text):
        if not tag[1]:
            start = tag.end() if start is None else start
        elif start is not None:
            thoughts.append(text[start : tag.start()])
            start = None
    return thoughts


def has_order(query: str) -> bool:
    """Return whether a query has an ORDER BY, at any depth."""
    return _ORDER_BY.search(query) is not None


def grade_sql(
    predicted: str,
    gold: str,
    db_file: str,
    *,
    rule: Rule = "skyrl",
    ordered: bool = False,
    timeout: float = QUERY_SECONDS,
) -> Grade:
    """Score 1 if both queries return the same rows on the database, else 0.

    Values are compared as in Python: 2 equals 2.0, '2' does not equal 2. Memory is bounded by the gold query's rows:
    the first row that is not among them ends the predicted query.

    Args:
        rule: Which properties count in addition to the values.
            skyrl: SkyRL's. The order of columns counts; the order of rows and how often each comes do not, unless
                `ordered`.
            spider: as in Spider's test-suite evaluation (https://arxiv.org/abs/2010.02840, with `--keep_distinct`).
                The order of columns does not count; how often each row comes does; the order of rows does if the gold
                query has an ORDER BY.
        ordered: Rows must come in the gold query's order, and as often.
        timeout: Seconds for each of the two queries, and for finding an order of columns.

    Returns:
        `Score`; `Invalid` if the predicted query does not run, `Timeout` if it does not end; `InfraError` if the
        database cannot be read or the gold query times out, which is attributed to the load of the machine.

    Raises:
        TaskError: the gold query fails, or returns more rows than can be compared.
    """
    limits = QueryLimits(wall_seconds=timeout)
    try:
        gold_rows = _read_gold_rows(gold, db_file, limits)
        with closing(read_rows(db_file, predicted, limits)) as rows:
            if rule == "spider":
                return compare_bags(rows, gold_rows, ordered=ordered or has_order(gold), seconds=timeout)
            return compare_lists(rows, gold_rows) if ordered else compare_sets(rows, gold_rows)
    except InfraError as failure:
        return failure
    except QueryTimeout:
        return Timeout(timeout, "the query")
    except QueryError as failure:
        return Invalid(str(failure))


def _read_gold_rows(gold: str, db_file: str, limits: QueryLimits) -> list[Row]:
    rows: list[Row] = []
    try:
        with closing(read_rows(db_file, gold, limits)) as results:
            for row in results:
                rows.append(row)
                if len(rows) > MAX_GOLD_ROWS:
                    raise QueryError(f"it returns more than {MAX_GOLD_ROWS} rows")
    except QueryTimeout as failure:
        raise InfraError(f"the gold query {gold!r:.500} on {db_file}: {failure}") from failure
    except QueryError as failure:
        raise TaskError(
            f"reward_spec.ground_truth must be a query that runs on {db_file}; {gold!r:.500} does not: {failure}"
        ) from failure
    return rows


def compute_score_single(completion: str, reference: str, db_file: str) -> float:
    """Return the reward of a whole episode's text: -1 for a wrong format, 1 for the gold query's rows, else 0.

    Raises:
        InfraError, TaskError: see `grade_sql`; the episode has no reward.
    """
    valid, _, solution, _ = verify_format_and_extract(completion)
    if not valid or solution is None:
        return -1.0
    return reward_of(grade_sql(solution, reference, db_file))
