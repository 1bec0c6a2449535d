"""HTML of trajectories by `render_html` of the environment's class.

Only environments registered in this process count (skyrl_gym, installed packages, `--import FILE`): a run folder from
elsewhere can name one of them, but no module to import.
"""

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import env_class_of, registry
from skyrl_train.types import JsonObject

FRAME_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; sandbox"
"""Content security policy of what an environment returned: no script, nothing from elsewhere."""

MAX_HTML = 4 << 20


def render(environment: object, row: JsonObject) -> str | None:
    """Return a row of a trajectories file as an HTML page; None if its environment has no renderer.

    Args:
        environment: id of the row's environment, as a file has it.
    """
    if not isinstance(environment, str) or environment not in registry:
        return None
    try:
        cls = env_class_of(skyrl_gym.spec(environment))
        if cls is None or not issubclass(cls, BaseTextEnv) or cls.render_html is BaseTextEnv.render_html:
            return None
        fragment = cls.render_html(row)
    except Exception as error:  # code of a user, given a row that may be damaged
        return _to_escaped(f"render_html of environment {environment} raised {type(error).__name__}: {error}")
    if fragment is None:
        return None
    if not isinstance(fragment, str):
        return _to_escaped(f"render_html of environment {environment} must return text; got {type(fragment).__name__}")
    if len(fragment) > MAX_HTML:
        return _to_escaped(f"render_html of environment {environment} returned more than {MAX_HTML:,} characters")
    return f'<!doctype html><meta charset="utf-8"><body style="font: 14px system-ui, sans-serif">{fragment}'


def _to_escaped(text: str) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;").encode("utf-8", "replace").decode()
    return f'<!doctype html><meta charset="utf-8"><pre style="white-space: pre-wrap">{safe}</pre>'
