"""Streaming comparison of a query's rows with the gold query's rows. The first differing row ends it."""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence

from skyrl_gym.graders.results import Score
from skyrl_gym.sandbox.sqlite import QueryTimeout, Row


def compare_sets(rows: Iterable[Row], gold_rows: Sequence[Row]) -> Score:
    """Compare ignoring the order of rows and their multiplicity."""
    gold, found = set(gold_rows), set()
    for row in rows:
        if row not in gold:
            return _build_wrong_score(f"a row that the gold query does not give: {row!r:.200}")
        found.add(row)
    return _score(len(found), len(gold))


def compare_lists(rows: Iterable[Row], gold: Sequence[Row]) -> Score:
    """Compare row by row."""
    num_rows = 0
    for row in rows:
        if num_rows >= len(gold) or row != gold[num_rows]:
            return _build_wrong_score(f"row {num_rows + 1} is not the gold query's: {row!r:.200}")
        num_rows += 1
    return _score(num_rows, len(gold))


def compare_bags(rows: Iterable[Row], gold: Sequence[Row], *, ordered: bool, seconds: float) -> Score:
    """Compare multisets of rows up to one permutation of the columns.

    Args:
        ordered: The order of rows counts, too.

    Raises:
        QueryTimeout: the search over column orders exceeded its time.
    """
    missing = Counter(hash(_count_common(row)) for row in gold)
    found: list[Row] = []
    for row in rows:
        bag = hash(_count_common(row))
        if missing[bag] == 0:
            return _build_wrong_score(f"a row that the gold query does not give, or not so often: {row!r:.200}")
        missing[bag] -= 1
        found.append(row)
    if len(found) < len(gold):
        return _score(len(found), len(gold))
    columns, gold_columns = list(zip(*found, strict=True)), list(zip(*gold, strict=True))
    if ordered:
        same = Counter(columns) == Counter(gold_columns)
    else:
        same = _is_same_bag_of_rows(columns, gold_columns, time.monotonic() + seconds)
    return (
        _score(len(found), len(gold))
        if same
        else _build_wrong_score("the gold query's rows in another order, or mixed")
    )


def _is_same_bag_of_rows(columns: list[Row], gold: list[Row], deadline: float) -> bool:
    """Return whether some order of the columns gives the rows of the gold columns.

    Gold columns are matched one after the other. Rows with the same values so far are a class; a choice is followed up
    only while each class has as many rows as the gold query's.
    """
    number_of: dict[Row, int] = {}  # equal columns are one choice
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, column in enumerate(columns):
        number_of.setdefault(column, index)
        alike[_count_common(column)].append(index)
    first = [number_of[column] for column in columns]
    all_rows = [0] * len(gold[0]) if gold else []
    pending: list[tuple[tuple[int, ...], list[int], list[int]]] = [((), all_rows, all_rows)]
    while pending:
        chosen, found_classes, gold_classes = pending.pop()
        if len(chosen) == len(gold):
            return True
        classes: dict[Hashable, int] = {}
        gold_column = gold[len(chosen)]
        new_gold = _refine(gold_classes, gold_column, classes)
        wanted = Counter(new_gold)
        choices = {first[index]: index for index in alike[_count_common(gold_column)] if index not in chosen}
        for index in choices.values():
            if time.monotonic() > deadline:
                raise QueryTimeout("no order of columns was found in time")
            new_found = _refine(found_classes, columns[index], classes)
            if Counter(new_found) == wanted:
                pending.append(((*chosen, index), new_found, new_gold))
    return False


def _refine(classes: list[int], column: Row, numbers: dict[Hashable, int]) -> list[int]:
    """Return each row's class given its class so far and its value in one more column."""
    return [numbers.setdefault(key, len(numbers)) for key in zip(classes, column, strict=True)]


def _count_common(values: Row) -> Hashable:
    """Return what two sequences of the same values, each as often, have in common."""
    return frozenset(Counter(values).items())


def _score(found: int, wanted: int) -> Score:
    return (
        Score(1.0, details={"rows": wanted})
        if found == wanted
        else _build_wrong_score(f"{found} of the gold query's {wanted} rows")
    )


def _build_wrong_score(reason: str) -> Score:
    return Score(0.0, details={"reason": reason})
