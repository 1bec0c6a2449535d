"""`tx console`: pages of each key's own runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient
from tx_server import ServerProcess

from tx.run import console
from tx.run.console import Console
from tx.tinker.http.api_keys import ApiKeys

KEYS = {"anna": "tml-anna-key", "bela": "tml-bela-key", "operator": "tml-operator-key"}
SECRET = "of bela alone"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of anna, bela and the server, and an unrelated folder and file."""
    for name, tinker in (("s1_train_0", {"tenant": "anna"}), ("s2_train_0", {"tenant": "bela"}), ("server", {})):
        folder = tmp_path / "runs" / name
        (folder / "logs").mkdir(parents=True)
        (folder / "config.yaml").write_text(json.dumps({"trainer": {"run_name": name}, "tinker": tinker}))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "train/loss": 2.5}) + "\n")
        (folder / "logs" / "trainer.log").write_text(f"{SECRET if name == 's2_train_0' else 'of another'}\n")
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "loose.log").write_text(SECRET)
    return tmp_path / "runs"


@pytest.fixture
def app(runs: Path) -> Console:
    keys = [(name, key) for name, key in KEYS.items() if name != "operator"]
    return Console(runs, ApiKeys([*keys, ("operator", KEYS["operator"], "admin")]), "http://127.0.0.1:1")


def client_of(app: Console, tenant: str) -> TestClient:
    client = TestClient(app, base_url="http://127.0.0.1")
    opened = client.get("/", params={"token": KEYS[tenant]})
    assert opened.status_code == 200 and "token" not in str(opened.url)
    assert KEYS[tenant] not in str(client.cookies), "the browser keeps no key"
    return client


def test_console_key_sees_own_runs_only(app: Console):
    with client_of(app, "anna") as anna, client_of(app, "operator") as operator:
        assert [row["name"] for row in anna.get("/api/runs").json()["runs"]] == ["s1_train_0"]
        asked = {"run": "s1_train_0", "name": ["train/loss"]}
        assert anna.get("/api/curves", params=asked).json()["curves"]["train/loss"] == [[1], [2.5]]
        log = {"name": "trainer.log"}
        assert anna.get("/api/log", params={"run": "s1_train_0"} | log).json()["text"] == "of another\n"
        for run in ("s2_train_0", "server", "torn", "s1_train_0/../s2_train_0", ".", "./s2_train_0", "nowhere"):
            for path in ("run", "settings", "logs", "log", "metrics", "curves", "lanes"):
                answer = anna.get(f"/api/{path}", params={"run": run} | log)
                assert SECRET not in answer.text and "bela" not in answer.text, (path, run)
        assert SECRET not in anna.get("/api/log", params={"run": ".", "name": "explanations/../loose.log"}).text
        assert {row["name"] for row in operator.get("/api/runs").json()["runs"]} >= {
            "s1_train_0",
            "s2_train_0",
            "server",
        }
        assert operator.get("/api/log", params={"run": "s2_train_0"} | log).json()["text"] == f"{SECRET}\n"


def test_console_shows_nothing_without_known_key(app: Console):
    with TestClient(app, base_url="http://127.0.0.1", follow_redirects=False) as client:
        for headers in ({}, {"X-API-Key": "tml-other-key"}, {"Cookie": "tx_console=guessed"}):
            for path in ("/", "/api/runs", "/assets/app.js", "/playground", "/playground/checkpoints", "/?token=wrong"):
                answer = client.get(path, headers=headers)
                assert (answer.status_code, "open it as /?token=KEY" in answer.text) == (401, True)
        bearer = client.get("/api/runs", headers={"Authorization": f"Bearer {KEYS['bela']}"})
        assert [row["name"] for row in bearer.json()["runs"]] == ["s2_train_0"]


def test_sampling_page_reports_unreachable_server_and_refuses_forms(app: Console):
    with client_of(app, "bela") as bela:
        assert "Sample from a checkpoint" in bela.get("/playground").text
        assert bela.get("/playground.js").headers["content-type"].startswith("text/javascript")
        away = bela.get("/playground/checkpoints")
        assert (away.status_code, "set its address with --server" in away.json()["detail"]) == (502, True)
        form = bela.post("/playground/completions", data={"prompt": "x"})
        assert form.status_code == 415
        endless = (b"x" * (console.MAX_BODY_BYTES // 2) for _ in range(3))  # without content-length
        assert bela.post("/playground/completions", content=endless, headers=JSON).status_code == 413


def test_keyless_console_needs_token_and_local_host_name(runs: Path):
    app = Console(runs, ApiKeys(), "http://127.0.0.1:1")
    for base_url, status in (("http://127.0.0.1", 200), ("http://localhost:8265", 200), ("http://evil.example", 400)):
        with TestClient(app, base_url=base_url) as client:
            refusal = 401 if status == 200 else status  # of another user of the machine
            assert client.get("/api/runs").status_code == refusal
            assert client.get("/", params={"token": app.token[:-1]}).status_code == refusal
            assert client.get("/", params={"token": app.token}).status_code == status
            assert client.get("/api/runs").status_code == status
            assert app.token not in str(client.cookies)


def test_console_login_expires(app: Console):
    with client_of(app, "anna") as anna:
        assert anna.get("/api/runs").status_code == 200
        app._logins = {cookie: login._replace(expires_at=0.0) for cookie, login in app._logins.items()}
        assert anna.get("/api/runs").status_code == 401
        assert anna.get("/", params={"token": KEYS["anna"]}).status_code == 200
        assert len(app._logins) == 1, "the expired one is gone"


def test_wrong_options_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    state = ["--state-dir", str(tmp_path / "state")]
    assert console.main(state) == 2
    assert "has no runs; set --state-dir" in capsys.readouterr().err
    assert console.main([*state, "--console-host", "0.0.0.0"]) == 2
    assert "--console-host 0.0.0.0 is reachable from other machines" in capsys.readouterr().err
    (tmp_path / "state" / "runs").mkdir(parents=True)
    assert console.main([*state, "--login-hours", "0"]) == 2
    assert "--login-hours must be above 0; got 0.0" in capsys.readouterr().err
    assert console.main([*state, "--prot", "1"]) == 2
    assert "did you mean --port" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.slow
def test_browser_user_views_curve_and_samples(tiny_model: Path, tmp_path: Path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs skyrl-agent[browser]")
    program = shutil.which("chromium") or pytest.skip("no Chromium: apt-get install chromium")
    options = ["--base-model", str(tiny_model), "--served-model-name", "tiny", "--no-standby-engine"]
    options += ["--keep-samples", "4"]
    with ServerProcess(tmp_path / "server", *options, tenants=["anna"]) as server:
        command = [sys.executable, "-m", "tx.run.main", "console", "--console-port", "0", "--server", server.url]
        command += ["--state-dir", str(server.state), "--api-keys-file", str(server.folder / "keys")]
        train_one_step(server)
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            sync_api.sync_playwright() as play,
        ):
            try:
                assert process.stdout is not None
                address = process.stdout.readline().split()[-1]
                browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
                page, errors = browser.new_page(), []
                page.set_default_timeout(60_000)
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
                page.goto(f"{address}?token={server.key('anna')}")
                page.get_by_text("_train_0").first.wait_for()
                page.goto(f"{address}playground")
                page.get_by_text("0 checkpoints of this key").wait_for()
                page.fill("#prompt", "Hi")
                page.fill("#n", "2")
                page.click("#ask")
                page.locator("#samples pre").nth(1).wait_for()
                assert (
                    "[length]" in page.locator("#samples").inner_text()
                    or "[stop]" in page.locator("#samples").inner_text()
                )
                [run] = (server.state / "runs").glob("*_train_0")
                page.goto(f"{address}#/run/{run.name}/step?phase=train&step=1")
                page.get_by_text("4 tokens").nth(1).wait_for()
                assert "teach nothing" not in page.locator("main").inner_text()
                page.get_by_role("link", name="sample 1").click()
                page.get_by_text("prompt").first.wait_for()
                assert errors == []
                browser.close()
            finally:
                process.terminate()


def train_one_step(server: ServerProcess) -> None:
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": server.key("anna")}, timeout=60) as client:

        def do(endpoint: str, **body: object) -> dict:
            accepted = client.post(endpoint, json=body).raise_for_status().json()
            while "request_id" in accepted:
                answer = client.post("retrieve_future", json={"request_id": accepted["request_id"]})
                if answer.status_code == 200:
                    return answer.json()
            return accepted

        session = do("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        lora = {"rank": 4}
        model = do("create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=lora)["model_id"]
        do("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.01})
        do("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [40, 41]}]}
        params = {"max_tokens": 4, "stop": []}
        sampler = f"{session}:sample:0"
        do("asample", sampling_session_id=sampler, seq_id=0, num_samples=2, prompt=prompt, sampling_params=params)
