"""The page for people."""

from tx.tinker.http.status_page import status_page


def test_whatever_the_desk_says_is_on_the_page():
    page = status_page("tx", {"uptime": 12.0, "engine": {"state": "ready"}, "models": [{"id": "m", "steps": 12345}]})
    assert "<td>ready</td>" in page
    assert "<th>steps</th>" in page
    assert "12,345" in page
    assert page.index("uptime") < page.index("<h2>engine</h2>") < page.index("<h2>models</h2>")


def test_names_from_outside_are_text_not_html():
    page = status_page(
        "tx", {"models": [{"<b>": "<script>alert(1)</script>"}], "errors": ["<i>"], "x": {"<a>": ["<u>"]}}
    )
    for tag in ("<script>", "<b>", "<i>", "<a>", "<u>"):
        assert tag not in page


def test_the_page_needs_nothing_from_elsewhere():
    page = status_page("tx", {"models": []})
    assert "none" in page
    for reference in ("http:", "https:", "src=", "href=", "@import", "url("):
        assert reference not in page
