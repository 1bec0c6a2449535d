"""The pages in Chromium, served by the command as users start it."""

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
import pytest
from dashboard_runs import HOSTILE, make_old, tiny_settings, train, trajectory, write_run

from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.utils.token_columns import encode_columns

pytestmark = [pytest.mark.slow, pytest.mark.process]

PATIENCE = 60_000
"""Milliseconds that a page may take: other tests may have the processors."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs skyrl-agent[browser]")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=PATIENCE)
        except sync_api.Error as error:
            pytest.skip(f"Chromium does not start (playwright install chromium): {error.message.splitlines()[0]}")
        yield chromium
        chromium.close()


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start the command on a free port. Yields: address and process."""
    command = [sys.executable, "-m", "skyrl_train.dashboard", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1].rstrip("/"), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def open_page(browser: Any, width: int = 1400, scheme: str = "light") -> Iterator[Any]:
    """A page that must neither fail, nor be refused by its policy, nor ask another server."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("console", lambda message: message.type == "error" and said.append(f"console: {message.text}"))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: "127.0.0.1" in request.url or said.append(f"request: {request.url}"))
    yield page
    assert [text for text in said if "404 (Not Found)" not in text] == []  # a torn line has no page
    context.close()


def place(run: str, page: str, **query: Any) -> str:
    return f"/#/run/{run}/{page}" + (f"?{urlencode(query)}" if query else "")


def test_agent_sample_shows_tool_outputs_and_sandbox_log_as_text(browser: Any, tmp_path: Path):
    hostile = "<img src=x onerror=alert(1)>\x1b[31m"
    command = {"stage": "evaluate", "command": f"make test {hostile}", "stdout": hostile, "stderr": "2 failed"}
    record = {
        "instance_id": "a", "trajectory_id": 0, "reward": 0.0, "finish_reason": "FINISH_TOOL",
        "rows": [
            {"prompt": "Do it.", "spans": [[True, f"<think>hm {hostile}</think>call"], [False, "out"]],
             "prompt_ids": [7, 8], "response_ids": [1, 2]},
            {"prompt": "Do it.", "spans": [[True, "again"]], "prompt_ids": [7, 8, 1], "response_ids": [3]},
        ],
        "messages": [
            {"role": "user", "content": f"Do it. {hostile}"},
            {"role": "assistant", "content": "On it.", "reasoning_content": f"secret plan {hostile}",
             "tool_calls": [{"function": {"name": hostile, "arguments": {"command": hostile}}}]},
            {"role": "tool", "name": hostile, "content": [{"type": "text", "text": hostile}, {"type": hostile}]},
            None, 3, {"role": hostile, "content": None, "tool_calls": [None, 3]},
        ],
        "reward_parts": {hostile: 0.5}, "time": 1000.0,
        "stage_seconds": {"queue_initialize": 1.0, "initialize": 2.0, "generate": 4.0, "evaluate": 3.0},
        "tool_calls": [{"step": 1, "name": "bash", "arguments": {"command": "ls"}, "output": hostile, "seconds": 0.2}],
        "sandbox": [command | {"outcome": "exited", "returncode": 2, "seconds": 1.5}],
    }  # fmt: skip
    file = tmp_path / "trajectories.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with serving(file) as (url, _), open_page(browser) as page:
        page.goto(url + place(".", "sample", phase="eval", step=0, line=0))
        log = page.locator("section", has_text="Sandbox log").last
        log.wait_for()
        assert "evaluate" in log.inner_text() and "exit 2" in log.inner_text()
        log.locator("summary").click()
        assert "2 failed" in log.inner_text() and "<img src=x" in log.inner_text()
        page.locator("section", has_text="Tool calls").last.locator("summary").click()
        turns = page.locator("section", has=page.locator("h2", has_text="Turns")).last
        assert "secret plan" not in turns.inner_text(), "thoughts are folded"
        turns.locator("summary", has_text="thinking").click()
        assert "secret plan <img src=x" in turns.inner_text() and "calls <img" in turns.inner_text()
        branches = page.locator("section", has_text="branches off row 0 after 3 tokens").last
        assert "row 0 begins on its own" in branches.inner_text()
        assert page.locator("svg.lanes rect").count() == 4
        page.goto(url + place(".", "time"))
        page.wait_for_selector("text=Stages of the dispatcher")
        table = page.locator("table", has_text="Stage of the dispatcher").inner_text()
        assert "waits for initialize" in table and "evaluate" in table and "waits for evaluate" not in table
        assert page.locator("img, [onerror]").count() == 0


def test_hostile_text_stays_text_on_every_page(browser: Any, tmp_path: Path):
    run = write_run(tmp_path / "runs" / "hostile", last_record=f"ERROR   {HOSTILE}")
    run.write_config(f"trainer: {{run_name: {json.dumps(HOSTILE)}, algorithm: {{a: 1}}}}\n")
    run.append_metrics(4, {f"mine/{HOSTILE}": 1.0})
    huge = trajectory(HOSTILE, 0, tokens=["x" * 10_000_000, HOSTILE, "\n", "end"], failed=True)
    account = {"drawn": 4, "trained": 4, "exact": 3, "not_trained": {HOSTILE: 1}, "new_rows": {HOSTILE: HOSTILE}}
    huge["certificate"] = account | {"branches": [[None, 0], [0, HOSTILE], [HOSTILE, 2], None]}
    run.write_trajectories(4, "train", [huge, trajectory(HOSTILE, 1)])
    with open(run.trajectories_path(4, "train"), "ab") as file:
        file.write(
            b'{"uid": "\xff\xfe", "prompt": "<img src=x>\\u001b[31m", "tokens": {"text": [3, null]}}\n\xff{\n{"torn": '
        )
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"step": 5, "rew')
    pages = [place("hostile", name) for name in ("curves", "step", "time", "settings", "logs")]
    pages += [place("hostile", "sample", phase="train", step=4, line=line) for line in range(5)]
    with serving(tmp_path / "runs") as (address, _):
        for width, scheme in ((1400, "light"), (400, "dark")):
            with open_page(browser, width, scheme) as page:
                for path in ["/#/", *pages]:
                    page.goto(address + path)
                    page.wait_for_selector("main section")
                    body = page.evaluate("document.body.innerText.length")
                    assert body < 300_000, (path, "not all of a text of 10 MB is drawn")
                    assert "taken" not in page.title().split("<")[0]
                    assert page.evaluate("document.querySelectorAll('img, body script, iframe, [onerror]').length") == 0
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, "fits the window")
                page.goto(address + pages[5])
                assert "onerror" in page.inner_text(".failure")
                assert "3 of 4 (75.0 %)" in page.locator("section", has_text="Token certificate").last.inner_text()
                page.goto(address + pages[8])
                page.wait_for_selector("text=This line is not JSON")
                page.goto(address + pages[1])
                page.wait_for_selector("text=The last line is incomplete")
                notices = page.locator(".notice").all_inner_texts()
                assert notices[1:] == ["1 lines cannot be read: line 4 is the first."], notices


RENDERER = """
import html
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv

class Shown(BaseTextEnv):
    @staticmethod
    def render_html(row):
        said = html.escape(row["response"])
        return f"<b id=board>{said}</b><script>parent.document.title='taken'</script><img src=x onerror='1'>"

skyrl_gym.register(id="shown", entry_point=Shown)
"""


def test_tokens_are_colored_and_environments_render_html(browser: Any, tmp_path: Path):
    run = write_run(tmp_path / "runs" / "adding")
    rows = [trajectory("0", 0, tokens=[f" word{i}" for i in range(3000)])]
    rows[0]["env_class"] = "shown"
    run.write_trajectories(3, "train", rows)
    engine = np.array(rows[0]["tokens"]["log_probs"])
    gaps = np.zeros(3000)
    gaps[[2500, 40]] = [-0.5, 0.25]
    columns = {"trainer_log_probs": engine + gaps, "entropies": np.full(3000, 1.5), "advantages": np.full(3000, -2.0)}
    run.write_token_columns(3, [{"uid": "0", **encode_columns({**columns, "trained": np.ones(3000)})}])
    (tmp_path / "mine.py").write_text(RENDERER)
    with serving(tmp_path / "runs", "--import", str(tmp_path / "mine.py")) as (address, _):
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()  # a refused script of the frame is told on the console
        page.set_default_timeout(PATIENCE)
        page.goto(address + place("adding", "sample", phase="train", step=3, line=0))
        page.wait_for_selector(".token")
        options = page.locator("select[aria-label='Colour by'] option").all_inner_texts()
        assert {"trainer log-prob", "entropy", "advantage", "difference (trainer - engine)"} <= set(options)
        for index in (2500, 40, 2500):  # after the last comes the first
            page.click("text=Largest gap")
            page.wait_for_function("at => document.querySelector('.picked')?.dataset.index === String(at)", arg=index)
        assert page.input_value("select[aria-label='Colour by']") == "difference"
        assert page.locator(".picked").evaluate("node => node.style.background") != ""
        frame = page.frame_locator("iframe.rendered")
        assert "word2999" in frame.locator("#board").inner_text()
        assert page.title() == "adding · sample"
        assert page.evaluate("document.querySelector('iframe').getAttribute('sandbox')") == ""
        context.close()


def test_list_shows_differing_settings_as_columns(browser: Any, tmp_path: Path):
    """Columns are the settings that differ, titles name them, and a view is saved in the address."""
    for folder, seed, lr in (("a", 1, 1e-5), ("b", 2, 1e-5), ("c", 1, 1e-4), ("d", 2, 1e-4)):
        write_run(tmp_path / folder, name="sweep", seed=seed, lr=lr)
    with serving(tmp_path) as (address, _), open_page(browser) as page:
        page.goto(f"{address}/#/")
        page.wait_for_selector("th >> text=lr")
        columns = [text.strip() for text in page.locator("th").all_inner_texts()]
        assert {"lr", "seed"} <= set(columns) and not {"path", "use_kl_loss"} & set(columns)
        page.click("th >> text=lr")
        page.click("th >> text=lr")
        rows = page.locator("tbody tr")
        assert ["1e-4" in rows.nth(i).inner_text() for i in range(4)] == [True, True, False, False]
        page.fill("input[type=search]", "lr=0.0001 seed=2")
        page.wait_for_function("document.querySelectorAll('tbody tr').length === 1")
        assert "sort=" in page.url and "lr%3D0.0001" in page.url
        page.goto("about:blank")
        page.go_back()  # the view is in the address
        page.wait_for_selector("text=1 of 4")
        page.goto(address + place("a", "curves", **{"with": json.dumps(["b", "c", "d"])}))
        page.wait_for_selector(".chart canvas")
        legend = page.locator(".legend").first
        for title in ("sweep · lr=1e-5 · seed=1", "sweep · lr=1e-4 · seed=2"):
            page.wait_for_selector(f".legend >> text={title}")
        page.check("text=Mean over seeds")
        page.wait_for_selector(".legend >> text=/2 seeds/")
        assert legend.inner_text().count("2 seeds") == 2 and "seed=" not in legend.inner_text()


def test_pages_of_large_run_stay_within_memory(browser: Any, tmp_path: Path):
    rng = random.Random(0)
    run = write_run(tmp_path / "long", 1, total=2000)
    names = [f"group{index % 12}/metric_{index}" for index in range(150)]
    with open(run.metrics_path, "w") as file:
        for step in range(1, 2001):
            values = {
                "reward/avg_raw_reward": step / 2000,
                "timing/step": 9.5,
                **{name: rng.random() for name in names},
            }
            file.write(json.dumps({"step": step, "time": 1e9 + 10 * step, **values}) + "\n")
    words = [" the", " answer", " is", " 4", "\n", " because", " step", " we"]
    rows = [
        trajectory(str(i // 8), i % 8, reward=float(i % 3 == 0), tokens=rng.choices(words, k=rng.randint(200, 1000)))
        for i in range(512)
    ]
    run.write_trajectories(1, "train", rows)
    for step in range(2, 2000):
        os.link(run.trajectories_path(1, "train"), run.trajectories_path(step, "train"))
    run.write_trajectories(2000, "train", [trajectory("0", 0, tokens=rng.choices(words, k=100_000)), *rows[1:]])
    many = np.full(100_000, -0.5)
    columns = encode_columns({"trainer_log_probs": many, "entropies": many, "advantages": many, "trained": many != 0})
    run.write_token_columns(2000, [{"uid": "0", **columns}])
    run.timeline_path.parent.mkdir()
    with open(run.timeline_path, "w") as file:
        for step in range(1, 2001):
            spans = [[f"{step}:{i // 8}_{i % 8}", i, step + i / 1000, step + 0.9, step, "finished"] for i in range(512)]
            times = {"step": step, "began": step, "ended": step + 1, "unit": "sample", "running": [], "waits": []}
            phases = [["generate", step, step + 0.9], ["policy_train", step + 0.9, step + 1]]
            record = times | {"trained": [span[0] for span in spans], "groups": spans, "phases": phases}
            file.write(json.dumps(record) + "\n")
    run.log_path("trainer").write_text("2026-01-01 00:00:00 INFO    step 2000/2000  reward 1\n")
    with serving(tmp_path) as (address, server), open_page(browser) as page:

        def load(path: str, selector: str) -> None:
            page.goto(address + path)
            page.wait_for_selector(selector)

        load("/#/", "text=2000 / 2000")
        load(place("long", "curves"), ".chart canvas")
        load(place("long", "step", step=777), "text=Groups")  # 10 MB of JSON
        load(place("long", "sample", phase="train", step=1500, line=300), ".token")
        load(place("long", "sample", phase="train", step=2000, line=0), ".token")
        assert "difference" in page.inner_text("select[aria-label='Colour by']")
        load(place("long", "time", step=1000), ".lanes")  # 60 MB of JSON, once
        load(place("long", "time", step=7), "text=Step 7, from")
        page.goto(address + place("long", "sample", phase="train", step=2000, line=0))
        page.wait_for_selector(".token")
        assert server.memory_info().rss < 500e6
        # 100,000 tokens: few have nodes, wherever one is, and the last are reached.
        for share in (0.3, 0.9, 0.1, 1.0):
            page.evaluate(
                "share => { const v = document.querySelector('.viewer'); v.scrollTop = share * v.scrollHeight }", share
            )
            page.wait_for_function(
                """() => { const box = document.querySelector('.viewer').getBoundingClientRect();
                const there = document.elementsFromPoint(box.x + 60, box.y + 200);
                return there.some((node) => node.closest(".token") || node.querySelector(":scope > .token")); }"""
            )
            assert page.evaluate("document.querySelectorAll('.token').length") < 12_000
        page.keyboard.press("u")
        page.wait_for_selector("text=Groups")
        page.keyboard.press("1")
        page.wait_for_selector(".chart canvas")


def test_live_killed_and_finished_run_is_followed(browser: Any, chat_model: str, tmp_path: Path):
    """A real run is watched while it trains, after kill -9, and when it was started again and ended."""
    path = tmp_path / "runs" / "live"
    path.parent.mkdir()
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"

    def start(num_steps: int) -> Any:
        process = context.Process(target=train, args=(tiny_settings(path, chat_model, num_steps),), daemon=True)
        process.start()
        return process

    with serving(path.parent) as (address, _), open_page(browser) as page:
        page.goto(f"{address}/#/")
        page.wait_for_selector("text=There is no run folder here yet")
        process = start(500)
        page.wait_for_selector("text=/^\\d+ \\/ 500$/")  # by an event: the page is not loaded again
        page.goto(address + place("live", "curves"))
        page.wait_for_selector(".chart canvas")
        first = int(page.inner_text("header .quiet >> text=/step \\d+ of/").split()[1])
        page.wait_for_function(
            "first => Number(/step (\\d+) of/.exec(document.querySelector('header').innerText)[1]) > first", arg=first
        )
        process.kill()
        process.join(30)
        make_old(RunFolder(path), 3600)
        page.wait_for_selector("header >> text=silent since")
        last = max(file.step for file in RunFolder(path).list_trajectory_files())
        page.goto(address + place("live", "step", step=last))
        page.wait_for_selector("text=Groups")
        process = start(4)
        process.join(180)
        assert process.exitcode == 0
        page.wait_for_selector("header >> text=step 4 of 4")
        page.wait_for_selector("header >> text=finished")
        page.goto(address + place("live", "time"))
        page.wait_for_selector(".lanes rect")
        page.goto(address + place("live", "sample", phase="train", step=4, line=0))
        page.wait_for_selector(".token")
        assert page.evaluate("document.querySelectorAll('.token').length") >= 1
