import time

import pytest

from skyrl_gym.tags import first_tagged, last_tagged


@pytest.mark.parametrize(
    "text, first, last",
    [
        ("<a>1</a>", "1", "1"),
        ("<a>1</a> then <a>2</a>", "1", "2"),
        ("<a>1<a>2</a>", "1<a>2", "2"),
        ("<a>1</a> </a> <a>", "1", "1"),
        ("</a><a>", None, None),
        ("<a></a>", "", ""),
        ("<a>open", None, None),
        ("<a>\n 1 \n</a>", "\n 1 \n", "\n 1 \n"),
        ("<b>1</b>", None, None),
        ("", None, None),
    ],
)
def test_text_between_tags(text, first, last):
    assert (first_tagged(text, "a"), last_tagged(text, "a")) == (first, last)


def test_megabyte_of_open_tags_is_parsed_fast():
    """A regular expression would need minutes."""
    text = "<a>" * 400_000
    started = time.process_time()
    assert first_tagged(text, "a") is None and last_tagged("</a>" + text, "a") is None
    assert time.process_time() - started < 1
