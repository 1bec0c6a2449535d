"""vLLM server for runs with `generator.run_engines_locally=false`: `python -m skyrl_train.entrypoints.serve_vllm
--model MODEL [--port PORT] [--api-key-file FILE] …`. Further options are passed to `vllm serve`.

It adds the worker extension for weights and log-probs and the control routes, and listens on loopback unless `--host`
is set. `/collective_rpc` calls any method of the workers, so other addresses require a key: a file with one line, or
the environment variable `SKYRL_ENGINE_API_KEY`; the trainer must use the same one
(`generator.remote_inference_engine_api_key_file`).
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from skyrl_train.env_vars import ENGINE_API_KEY
from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.remote.key_guard import GUARD, is_loopback, read_key_file
from skyrl_train.inference_engines.vllm.arguments import EXTENSION, GRAMMAR_BACKEND

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the control routes
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `tempered_sampler.py` supports the sampler of the first one
}


def build_server_command(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Build the command that serves, and its environment, which contains the key (the command does not).

    Raises:
        ConfigError: an externally reachable address without a key.
    """
    parser = argparse.ArgumentParser(
        prog="serve_vllm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--api-key-file", help="file with one line: the key that clients must send")
    ours, others = parser.parse_known_args(arguments)
    given = dict(environment) | _ENVIRONMENT
    if ours.api_key_file is not None:
        given[ENGINE_API_KEY] = read_key_file(ours.api_key_file, "--api-key-file")
    if not is_loopback(ours.host) and not given.get(ENGINE_API_KEY):
        raise ConfigError(
            f"--host={ours.host} can be reached from other machines, where anyone could call any method of the "
            "server's workers: set a key by --api-key-file FILE (head -c 32 /dev/urandom | base64 > FILE), and give "
            "the trainer the same key by generator.remote_inference_engine_api_key_file=FILE"
        )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", ours.host]
    command += [
        "--enable-scale-out",
        "--worker-extension-cls",
        EXTENSION,
        "--middleware",
        GUARD,
        "--max-logprobs",
        "-1",
        "--structured-outputs-config.backend",
        GRAMMAR_BACKEND,
    ]
    return command + others, given


def main() -> None:
    try:
        command, environment = build_server_command(sys.argv[1:], os.environ)
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
