"""A run in a terminal: progress, curves, the last samples, failures. `python -m skyrl_train.dashboard --terminal RUN`

`read_view` reads the files of a run, `render` draws what it returns: a function of data, without files or clock.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from skyrl_inspect.dashboard.catalog import Catalog, find_runs, is_run, list_trajectory_steps
from skyrl_inspect.dashboard.charts import build_overview
from skyrl_inspect.dashboard.curves import Curves
from skyrl_inspect.dashboard.run_diagnostics import read_run_diagnostics
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.steps import StepTrajectories
from skyrl_inspect.defaults import Defaults
from skyrl_train.errors import DataError
from skyrl_train.types import JsonObject
from skyrl_train.utils.progress import duration

SECONDS = 1.0
"""Time between two looks at the files."""

MAX_CURVES = 6
NUM_SAMPLES = 3
MAX_DIAGNOSTICS = 4
CURVE_ROWS = 3
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"finished": "green", "running": "cyan", "failed": "red", "stopped": "yellow", "silent": "yellow"}


@dataclass(frozen=True)
class RunView:
    """Data that the terminal shows of a run."""

    row: JsonObject
    """Row of the list of runs (`Catalog.row`)."""

    curves: Sequence[tuple[str, Sequence[float]]] = ()
    """Title and values, those of the overview that the run has."""

    step: int | None = None
    """Step of the samples."""

    samples: Sequence[JsonObject] = ()
    """The last of them (`steps.summarize`)."""

    failures: Counter[str] = field(default_factory=Counter)
    """Failed trajectories of that step by kind."""

    num_samples: int = 0
    failure: str | None = None
    """Message of one of the failures."""

    diagnostics: Sequence[JsonObject] = ()
    """Failures of training that the metrics show, oldest first."""


class RunReader:
    """Reader of the run folder `path`.

    Raises:
        DataError: the folder is not a run folder.
    """

    def __init__(self, path: str | Path):
        self._folder = RunsFolder(path)
        if not is_run(self._folder.entries(".")):
            names = find_runs(self._folder)
            below = f"; below it are {', '.join(names[:5])}" if names else ""
            raise DataError(f"{self._folder.path} is not a run folder: pass the folder of trainer.run_dir{below}")
        self._catalog = Catalog(self._folder, Defaults())
        self._curves = Curves(self._folder)
        self._steps = StepTrajectories(self._folder)

    def read_view(self) -> RunView:
        """Read the current state of the run."""
        row = self._catalog.get_row(".")
        file = self._curves.read_curves(".")
        curves = []
        for chart in build_overview(file.names)[:MAX_CURVES]:
            values = [value for value in file.curve(next(iter(chart["metrics"])))[1] if value is not None]
            curves.append((chart["title"], values))
        found = read_run_diagnostics(self._folder, ".", file)
        steps = list_trajectory_steps(self._folder, ".")["train"]
        if not steps:
            return RunView(row, curves, diagnostics=found)
        rows = [row for row in self._steps.summary(".", "train", steps[-1])["rows"] if not row.get("is_broken")]
        failed = [row["failure"] for row in rows if row["failure"]]
        return RunView(
            row,
            curves,
            steps[-1],
            rows[-NUM_SAMPLES:],
            Counter(failure["kind"] for failure in failed),
            len(rows),
            failed[0]["message"] if failed else None,
            found,
        )


def render(view: RunView, now: float, width: int = 100) -> RenderableType:
    """Draw a run.

    Args:
        now: Unix seconds.
        width: columns of the terminal.
    """
    parts: list[RenderableType] = [_render_header(view.row, now), _render_progress(view.row, now, width)]
    for found in view.diagnostics[-MAX_DIAGNOSTICS:]:
        text = f"{found['name']} since step {found['onset']}: {found['evidence']} {found['advice']}"
        parts.append(Text(to_printable(text), style="yellow"))
    if view.curves:
        columns = max(1, min(3, width // 34))
        parts.append(
            _render_grid([_render_curve(title, values, width // columns - 4) for title, values in view.curves], columns)
        )
    else:
        parts.append(Text("No step has finished yet.", style="dim"))
    if view.step is not None:
        parts.append(Rule(Text(f"step {view.step}: {view.num_samples} rows"), style="dim"))
        if view.failures:
            said = ", ".join(f"{count} {kind}" for kind, count in view.failures.most_common())
            parts.append(Text(f"failed: {said}; {to_printable(view.failure or '')[:200]}", style="red"))
        parts += [_sample(sample) for sample in view.samples]
    return Group(*parts)


def _render_header(row: JsonObject, now: float) -> RenderableType:
    state = row["state"]
    since = f" for {duration(now - row['since'])}" if state == "silent" else ""
    facts = [row["model"], row["environment"], f"seed {row['seed']}" if row["seed"] is not None else None]
    line = Text.assemble(
        (to_printable(str(row["name"])), "bold"), "  ", (f"{state}{since}", _COLOURS.get(state, "")), "  ",
        (to_printable("  ".join(str(fact) for fact in facts if fact)), "dim"), overflow="ellipsis", no_wrap=True,
    )  # fmt: skip
    return line if not row["message"] else Group(line, Text(to_printable(row["message"])[:500], style="red"))


def _render_progress(row: JsonObject, now: float, width: int) -> RenderableType:
    step, total, seconds = row["step"] or 0, row["total"], row["step_seconds"]
    said = [f"step {step}" + (f" of {total} ({step / total:.0%})" if total else "")]
    if seconds:
        said.append(f"{seconds:.3g} s a step")
        if total and row["state"] == "running":
            said.append(f"about {duration((total - step) * seconds)} left")
    if row["started"]:
        said.append(f"running for {duration(row['updated'] - row['started'])}")
    text = Text("  ".join(said))
    if not total:
        return text
    filled = min(width, round(width * step / total))
    return Group(Text.assemble(("━" * filled, "cyan"), ("━" * (width - filled), "bright_black")), text)


def _render_grid(cells: Sequence[RenderableType], columns: int) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in range(columns):
        table.add_column(ratio=1)
    for start in range(0, len(cells), columns):
        table.add_row(*cells[start : start + columns])
    return table


def _render_curve(title: str, values: Sequence[float], width: int) -> RenderableType:
    if not values:
        return Text(f"{title}\n(no number)", style="dim")
    last = Text.assemble((title, "bold"), f"  {values[-1]:.4g}", (f"  {min(values):.3g} to {max(values):.3g}", "dim"))
    last.no_wrap, last.overflow = True, "ellipsis"
    return Group(last, *(Text(line, style="cyan") for line in block_curve(values, max(8, width), CURVE_ROWS)))


def block_curve(values: Sequence[float], width: int, rows: int) -> list[str]:
    """Return a curve as lines of blocks, the highest first; a column is the mean of the values in it."""
    width = min(width, len(values))
    bounds = [len(values) * column // width for column in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    # The lowest value is one eighth of a block high, so that every column is seen.
    heights = [1 + round((8 * rows - 1) * ((mean - low) / (high - low) if high > low else 0.5)) for mean in means]
    return ["".join(_BLOCKS[max(0, min(8, height - 8 * row))] for height in heights) for row in reversed(range(rows))]


def _sample(sample: JsonObject) -> RenderableType:
    reward = "–" if sample["reward"] is None else f"{sample['reward']:.3g}"
    title = f"{to_printable(sample['uid'])}_{sample['sample']}  reward {reward}  {sample['tokens']} tokens"
    title += f"  {to_printable(sample['stop'])}" if sample["stop"] else ""
    body = Text.assemble((to_printable(sample["prompt"]), "dim"), to_printable(sample["preview"]))
    style = "red" if sample["failure"] else ("green" if (sample["reward"] or 0) > 0 else "dim")
    return Panel(body, title=Text(title), title_align="left", border_style=style)


def to_printable(text: str) -> str:
    """Return text in which characters that control a terminal, or the direction of writing, are replaced by signs."""

    def visible(sign: str) -> str:
        if sign.isprintable() or sign == "\n":
            return sign
        return chr(0x2400 + ord(sign)) if ord(sign) < 32 else "\ufffd"

    return "".join(map(visible, text))


def show(path: str | Path, console: Console | None = None) -> None:
    """Show a run until it has ended; once if the output is not a terminal.

    Raises:
        DataError: the folder is not a run folder.
    """
    console = console or Console()
    reader = RunReader(path)

    def draw() -> tuple[RenderableType, bool]:
        view = reader.read_view()
        return render(view, time.time(), console.width), view.row["state"] in ("running", "silent")

    if not console.is_terminal:
        console.print(draw()[0])
        return
    picture, goes_on = draw()
    with Live(picture, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            live.refresh()
            while goes_on:
                time.sleep(SECONDS)
                picture, goes_on = draw()
                live.update(picture, refresh=True)
        except KeyboardInterrupt:
            pass
        live.update(picture, refresh=True)
