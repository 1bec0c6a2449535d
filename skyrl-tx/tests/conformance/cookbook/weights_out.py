"""Training of a few steps, and its weights taken out by the tools of the SDK and of tinker-cookbook.

    TINKER_BASE_URL=… TINKER_API_KEY=… python weights_out.py MODEL FOLDER TOKEN ...    (with tinker-cookbook)

Prints JSON: log-probs of the tokens by the server's sampler, and the folder that each tool has made.
"""

import json
import subprocess
import sys
from pathlib import Path

import tinker
from tinker_cookbook import weights
from tinker_cookbook.weights import build_hf_model, build_lora_adapter

STEPS = 3


def trained(service: tinker.ServiceClient, tokens: list[int], **layers: bool) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1, **layers)
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    for _ in range(STEPS):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    return training


def log_probs_of(training: tinker.TrainingClient, tokens: list[int]) -> list[float | None]:
    sampler = training.save_weights_and_get_sampling_client()
    return sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()


def main(base_model: str, folder: Path, tokens: list[int]) -> None:
    service = tinker.ServiceClient()
    training = trained(service, tokens)
    state = training.save_state("state").result().path
    external = training.save_weights_external("external").result().path
    log_probs = log_probs_of(training, tokens)
    # An engine that serves adapters has none on the output layer.
    served = trained(service, tokens, train_unembed=False)
    path = served.save_weights_external("served").result().path
    for_engines = {
        "adapter": weights.download(tinker_path=path, output_dir=str(folder / "served")),
        "log_probs": log_probs_of(served, tokens),
    }

    adapters = {
        "download of a training checkpoint": weights.download(tinker_path=state, output_dir=str(folder / "state")),
        "download of external weights": weights.download(tinker_path=external, output_dir=str(folder / "external")),
    }
    for name, path in (("state", state), ("external", external)):
        command = [Path(sys.executable).with_name("tinker"), "checkpoint", "download", path, "--output", folder / "cli"]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=300)
        [adapters[f"tinker checkpoint download ({name})"]] = map(str, (folder / "cli").glob(f"*_{name}"))
    lora, merged = str(folder / "lora"), str(folder / "merged")
    build_lora_adapter(base_model=base_model, adapter_path=adapters["download of external weights"], output_path=lora)
    build_hf_model(base_model=base_model, adapter_path=adapters["download of external weights"], output_path=merged)
    adapters["build_lora_adapter"] = lora
    left = [one.checkpoint_id for one in service.create_rest_client().list_user_checkpoints().result().checkpoints]
    said = {"log_probs": log_probs, "adapters": adapters, "merged": merged, "for_engines": for_engines}
    print(json.dumps(said | {"checkpoints": sorted(left)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(token) for token in sys.argv[3:]])
