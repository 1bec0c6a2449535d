"""LLM judges: `skyrl_gym.graders.judge`, set up by a task file or the environment."""

import dataclasses
import os
from functools import cached_property

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.types import Row
from skyrl_gym.graders.judge import Judge, JudgeSettings
from skyrl_gym.services import AsyncService
from skyrl_gym.suggestions import did_you_mean

URL_VARIABLE = "STEM_LLM_JUDGE_URL"
MODEL_OF_URL = "openai/gpt-oss-20b"
"""Model that is assumed to be served at the URL of the environment variable, if the settings name none."""


def make_judge(settings: Row | None, where: str = "task_config.judge") -> Judge:
    """
    Args:
        settings: fields of `JudgeSettings`. Without a `base_url`: that in the environment variable STEM_LLM_JUDGE_URL;
            without that, the public service of OpenAI, which needs a key.

    Raises:
        ConfigError: an unknown field, or no judge is configured.
    """
    given = dict(settings or {})
    known = [field.name for field in dataclasses.fields(JudgeSettings)]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown key {where}.{name}; {did_you_mean(name, known)}")
    if not given.get("base_url") and (url := os.environ.get(URL_VARIABLE, "").strip()):
        given = {"model": MODEL_OF_URL, **given, "base_url": url}
    if url := given.get("base_url"):
        given["base_url"] = url if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"
    try:
        return Judge(JudgeSettings(**given))
    except ValueError as failure:
        raise ConfigError(f"{where}: {failure}; {URL_VARIABLE} can also set a server") from failure


class JudgedTask(BaseTask):
    """Task that uses an LLM judge for some responses. The judge is created at first use, or at construction if the task
    file configures it.

    Raises:
        ConfigError: the judge's settings are invalid.
    """

    def __init__(self, judge: Row | None = None) -> None:
        self._judge_settings = judge
        if judge is not None:
            _ = self.judge

    async def probe(self) -> None:
        if "judge" in vars(self):  # created, as the settings or a row require it
            try:
                await AsyncService(self.judge.url).probe()
            except InfraError as error:
                raise InfraError(f"task_config.judge: {error}; {URL_VARIABLE} can also set a server") from error

    @cached_property
    def judge(self) -> Judge:
        return make_judge(self._judge_settings)
