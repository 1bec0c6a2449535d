"""OpenEnv over the network (https://github.com/huggingface/OpenEnv, protocol of release 0.10): its servers as text
environments, and ours as its servers (`python -m skyrl_gym.hubs.openenv`).

The client needs `websockets` alone; a server needs `openenv`.
"""

from skyrl_gym.hubs.openenv.env import OpenEnv, OpenEnvConfig

__all__ = ["OpenEnv", "OpenEnvConfig"]
