"""Rows of a dataset of procedural tasks: a weighted mixture of generators, the same for the same seed."""

import json
import random
from collections.abc import Iterator, Sequence

from skyrl_gym.envs.reasoning_gym.curriculum import Source, build_config
from skyrl_gym.envs.reasoning_gym.library import EntryRequest, check_config, find_system_prompt, generate
from skyrl_gym.error import TaskError


def reasoning_gym_rows(
    sources: Sequence[str | Source],
    size: int,
    seed: int,
    *,
    system_prompt: str | None = "default",
    split: str = "train",
) -> Iterator[dict[str, object]]:
    """Make `size` rows in random order; the count of each source matches its weight to within one row.

    Args:
        sources: generators by name, or with weight, level and settings; one may come more than once
        size: number of rows
        seed: decides everything; the same in every process
        system_prompt: a text, the name of one of reasoning-gym's, or None for no system message
        split: written into `extra_info`

    Raises:
        TaskError: a generator, a level or a setting that does not exist, a weight that is not positive, or no source.
    """
    mixture = [Source(source) if isinstance(source, str) else source for source in sources]
    _check(mixture, size)
    configs = [_build_config(source) for source in mixture]
    order = _compute_shares([source.weight for source in mixture], size)
    random.Random(f"reasoning_gym_rows:{seed}").shuffle(order)
    counts = [0] * len(mixture)
    requests = []
    seeds = [_make_seed(seed, number) for number in range(len(mixture))]
    for number in order:
        requests.append(EntryRequest(mixture[number].dataset, seeds[number], counts[number], configs[number]))
        counts[number] += 1
    prefix = [{"role": "system", "content": find_system_prompt(system_prompt)}] if system_prompt else []
    for index, (request, entry) in enumerate(zip(requests, generate(requests), strict=True)):
        yield {
            "data_source": f"reasoning_gym/{request.dataset}",
            "prompt": [*prefix, {"role": "user", "content": entry["question"]}],
            "env_class": "reasoning_gym",
            "reward_spec": {"method": "rule", "ground_truth": entry["answer"] or ""},
            "dataset": request.dataset,
            # JSON text: columns of mappings would be given the keys of all generators
            "dataset_config": json.dumps(dict(request.config), sort_keys=True),
            "entry": json.dumps(entry),
            "extra_info": {"split": split, "index": index, "seed": request.seed, "entry_index": request.index},
        }


def _make_seed(seed: int, number: int) -> int:
    """Far from each other: generators add the index to the seed, so the entries of neighbouring seeds are the same."""
    return random.Random(f"reasoning_gym_rows:{seed}:{number}").randrange(2**31)


def _check(mixture: Sequence[Source], size: int) -> None:
    if not mixture:
        raise TaskError("sources must contain at least one generator")
    if size < 0:
        raise TaskError(f"size must be 0 or more; got {size}")
    for source in mixture:
        if not source.weight > 0:
            raise TaskError(f"weight must be above 0; got {source.weight} for {source.dataset}")


def _build_config(source: Source) -> dict[str, object]:
    config = check_config(source.dataset, source.config)
    if source.level is None:
        return config
    return check_config(source.dataset, build_config(source.dataset, source.level) | config)


def _compute_shares(weights: Sequence[float], size: int) -> list[int]:
    """Compute source numbers in proportion to the weights, by the largest-remainder method."""
    exact = [weight * size / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return [i for i, count in enumerate(counts) for _ in range(count)]
