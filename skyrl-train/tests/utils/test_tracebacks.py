"""An exception of a user's code is reported with the user's own lines, and its whole traceback is in the log."""

import json
import pickle
import sys
from pathlib import Path

from loguru import logger

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import RolloutError, WorkerError
from skyrl_train.utils.process_log import configure_logging
from skyrl_train.utils.ray_calls import prepare_errors_for_caller
from skyrl_train.utils.tracebacks import described, format_raise_location, log_traceback


def raised(action, *args) -> Exception:
    try:
        action(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def mine(depth: int = 0) -> None:
    if depth:
        mine(depth - 1)
    json.loads("no JSON")


def line_of(code: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip() == code)


def test_raise_location_omits_library_frames():
    error = raised(mine)
    last = format_raise_location(error).splitlines()[-1]
    number = line_of('json.loads("no JSON")')
    assert last == f'{__file__}:{number} in mine: json.loads("no JSON")'
    assert "json/decoder.py" not in format_raise_location(error)
    assert described(error).startswith("JSONDecodeError: Expecting value")


def test_raise_location_follows_cause_of_framework_error():
    error = raised(SkyRLConfig.from_dict, {"trainer": {"run_di": 1}})
    error.__traceback__ = None  # as one that an error of ours wraps and that has no frame of the user
    error.__cause__ = raised(mine)
    assert "in mine: json.loads" in format_raise_location(error)


def test_raise_location_of_infinite_recursion_is_short():
    def again() -> None:
        again()

    assert len(format_raise_location(raised(again)).splitlines()) == 4


def test_raise_location_without_user_frames_is_last_frame():
    namespace = {"__name__": "skyrl_train.something", "json": json}
    exec(compile("def inner():\n    json.loads('x')", "/ours/something.py", "exec"), namespace)
    error = raised(namespace["inner"])
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
    assert "raw_decode" in format_raise_location(error)


def test_traceback_is_written_once_to_log_file_and_not_console(tmp_path: Path, capfd):
    try:
        configure_logging(tmp_path / "trainer.log")
        for _ in range(3):
            log_traceback(raised(mine, 2))
        logger.info("for both")
    finally:
        logger.remove()
        logger.add(sys.stderr)
    text = (tmp_path / "trainer.log").read_text()
    assert text.count("Traceback (most recent call last)") == 1 and "json/decoder.py" in text and "for both" in text
    console = capfd.readouterr().err
    assert "Traceback" not in console and "for both" in console


class NeedsTwo(Exception):
    """Exception of a user: pickled with one argument, it cannot be rebuilt."""

    def __init__(self, first: str, second: str):
        super().__init__(f"{first} {second}")


def fail_by(error: Exception) -> None:
    raise error


def sent(action, *args) -> Exception:
    """The exception that another process gets where this one raised."""

    def act() -> None:
        with prepare_errors_for_caller():
            action(*args)

    return pickle.loads(pickle.dumps(raised(act)))


def test_frames_survive_process_boundary():
    arrived = sent(fail_by, RolloutError("tool", "no server"))
    assert isinstance(arrived, RolloutError) and (arrived.kind, str(arrived)) == ("tool", "no server")
    assert arrived.__traceback__ is None and format_raise_location(arrived).endswith("in fail_by: raise error")


def test_unpicklable_exception_is_sent_as_text():
    unpicklable = sent(fail_by, NeedsTwo("two", "words"))
    assert isinstance(unpicklable, WorkerError)
    assert str(unpicklable).startswith("raised NeedsTwo: two words\n")
    assert str(unpicklable).endswith("in fail_by: raise error")
    forgetful = sent(mine)  # JSONDecodeError rebuilds itself without what was attached
    assert type(forgetful) is ValueError and "in mine: json.loads" in str(forgetful)
