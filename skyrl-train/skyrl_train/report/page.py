"""The page: data, plotting library, style and script in one HTML file that needs no network.

What a model wrote is untrusted. It enters the page only as JSON in which `<`, `>` and `&` are escaped, the script puts
it into the page only as text, and the content security policy lets the browser run nothing but our two scripts (by
their hashes) and fetch nothing at all.
"""

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

from plotly.offline import get_plotlyjs

from skyrl_train.report.charts import groups, overview, timing_stages
from skyrl_train.report.collect import existing_run, page_data
from skyrl_train.types import JsonObject
from skyrl_train.utils.io import write_atomically

_ASSETS = files("skyrl_train.report") / "assets"


def write_report(run_path: str | Path, output: str | Path | None = None, *, max_samples: int = 200) -> Path:
    """Write the page about a run, which may still be going on.

    Args:
        run_path: the run folder.
        output: where to; `report.html` in the run folder if None.
        max_samples: trajectories that are embedded, spread over the run. Curves are always complete.

    Returns:
        The page's absolute path.

    Raises:
        DataError: there is no run, or one of its files is broken.
    """
    run = existing_run(run_path)
    path = Path(output).absolute() if output else run.report_path
    write_atomically(path, render(page_data(run, max_samples)))
    return path


def render(data: JsonObject) -> str:
    """The HTML of a page that shows the data (see `page_data`)."""
    names = data["curves"].keys()
    data = data | {"overview": overview(names), "groups": groups(names), "timing": timing_stages(names)}
    scripts = {"PLOTLY": get_plotlyjs(), "SCRIPT": _asset("report.js")}
    parts = {
        **scripts,
        "POLICY": " ".join(f"'sha256-{_script_hash(text)}'" for text in scripts.values()),
        "STYLE": _asset("report.css"),
        "DATA": _json_for_html(data),
    }
    return re.sub(r"{{([A-Z]+)}}", lambda mark: parts[mark[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json_for_html(data: dict[str, object]) -> str:
    """JSON that cannot end the element it stands in, nor start another."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
