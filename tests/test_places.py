"""Numbers of files in docs/extending.md against the files that name the last added entry of each kind."""

import re

from test_language import metrics


def claimed_places() -> dict[str, int]:
    """Return kind -> the number in brackets; of two, the second, which is that of the entry that is measured."""
    claims = {}
    for line in (metrics.ROOT / "docs" / "extending.md").read_text().splitlines():
        if match := re.match(r"\| ([^|]+) \| .*\((?:≤ )?(\d)(?:;[^)|]* (\d))?\) \|", line):
            claims[match[1]] = int(match[3] or match[2])
    return claims


def test_last_addition_of_each_kind_needed_no_more_files_than_the_documentation_says():
    measured, claimed = metrics.places_per_change(), claimed_places()
    assert set(measured) <= set(claimed)
    assert all(measured.values()), "an entry that no file names has been renamed: LAST_ADDED in dev/metrics.py"
    above = {kind: places for kind, places in measured.items() if len(places) > claimed[kind]}
    assert above == {}
