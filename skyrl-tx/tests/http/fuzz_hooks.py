"""Hooks for schemathesis (which reads the file by SCHEMATHESIS_HOOKS): two of three requests name existing objects, and
every refusal states its reason.
"""

import itertools
import json
import os
import re
from typing import Any

import schemathesis

REAL: dict[str, Any] = json.loads(os.environ["FUZZ_REAL"])
"""Fields of bodies and addresses, and what is there to put into them."""
ENDS_THINGS = ("/api/v1/unload_model", "/api/v1/sessions/{session_id}/finish")
_turns, _seqs = itertools.count(), itertools.count(1)
_FIELD_AND_RULE = re.compile(r"^[\w.\[\]'-]+: .")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if next(_turns) % 3 == 0 or case.method == "DELETE" or case.operation.path in ENDS_THINGS:
        return
    if isinstance(case.body, dict):
        case.body = case.body | {name: value for name, value in REAL.items() if name in case.body}
        if isinstance(case.body.get("seq_id"), int):
            case.body["seq_id"] = next(_seqs)
    if case.path_parameters:
        case.path_parameters |= {name: value for name, value in REAL.items() if name in case.path_parameters}


@schemathesis.check
def refusals_say_why(context: Any, response: Any, case: Any) -> None:
    """Check all 4xx responses but that of a poll without a result (408)."""
    if not 400 <= response.status_code < 500 or response.status_code == 408:
        return
    detail = response.json().get("detail")
    assert isinstance(detail, str) and len(detail) >= 15, f"{response.status_code} without a reason: {detail!r}"
    if response.status_code == 422:
        assert _FIELD_AND_RULE.match(detail), f"422 without field and rule: {detail!r}"
