"""GPUs of an engine of several, where it shares them with workers. Ray counts GPUs that do not exist as well."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os
import ray
from ray.util.placement_group import remove_placement_group
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.placement import make_shared_placement_group
from skyrl_train.orchestration.ray_launcher import EngineBundles, gpus_of_engines

os.environ |= dict(RAY_ENABLE_UV_RUN_RUNTIME_ENV="0", RAY_AUTH_MODE="disabled")
ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, logging_level="ERROR")
placement = {"device": "cuda", "colocate_all": True, "policy_num_gpus_per_node": 4}
config = SkyRLConfig.from_dict({
    "trainer": {"placement": placement, "run_dir": RUN_DIR},
    "generator": {"backend": "vllm", "num_inference_engines": 2, "inference_engine_tensor_parallel_size": 2},
})
group = make_shared_placement_group(config)
engines = gpus_of_engines(config, group)
assert [sorted(gpus) for _, gpus in engines] == [["0", "1"], ["2", "3"]], engines
assert len({bundle for bundle, _ in engines}) == 2
options = EngineBundles(config, group).options(1)
assert options["num_gpus"] == 0
assert sorted(options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"].split(",")) == ["2", "3"]

config.generator.inference_engine_tensor_parallel_size = 1
assert gpus_of_engines(config, group) == [], "Ray gives an engine its part of one GPU itself"
assert EngineBundles(config, group).options(1)["num_cpus"] == 0.2

remove_placement_group(group)
config.trainer.placement.colocate_all = False
config.generator.inference_engine_tensor_parallel_size = 2
options = EngineBundles(config, None).options(1)
assert (options["num_gpus"], options["num_cpus"]) == (2, 1), options
assert options["scheduling_strategy"].placement_group.bundle_specs == [{"CPU": 1, "GPU": 2}] * 2
os.environ["SKYRL_RAY_PG_TIMEOUT_IN_S"] = "1"
try:
    EngineBundles(config, None)
except WorkerError as error:
    assert "4 GPUs for the engines" in str(error) and "the cluster has 4, of which 0 are free" in str(error), error
else:
    raise AssertionError("a second group of engines found places")
print("well")
"""


@pytest.mark.full
def test_two_gpu_engines_divide_four_shared_gpus(tmp_path):
    script = textwrap.dedent(SCRIPT).replace("RUN_DIR", repr(str(tmp_path)))
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert finished.stdout.strip().endswith("well"), finished.stderr[-3000:]
