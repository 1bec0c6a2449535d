"""Small tasks with known good actions: two that are planned on a map, one that is found by playing it beforehand."""

import json

import gymnasium

from skyrl_gym.envs.base_text_env import Example

PROMPT = [{"role": "user", "content": "Play this environment as well as you can."}]

LAKES = {
    # maps on which the way of one ends in a hole of the other; F frozen, H hole, S start, G goal
    "SFHF HFHF FFFH FHFG": "RDDRDR",
    "SHFF FHFH FFFF HHHG": "DDRRRD",
    "SFFF HHHF HHHF GFFF": "RRRDDDLLL",
    "SHHH FHFF FFFH HHFG": "DDRRDR",
}
FROZEN_LAKE_ACTIONS = {"L": 0, "D": 1, "R": 2, "U": 3}

CART_POLE_SEEDS = (1, 2)
CART_POLE_ACTIONS_PER_TURN = 100


def examples() -> list[Example]:
    """Two episodes of CartPole-v1 and four of FrozenLake-v1."""
    return [_make_cart_pole(seed) for seed in CART_POLE_SEEDS] + [
        _make_frozen_lake(rows, way) for rows, way in LAKES.items()
    ]


def _make_frozen_lake(rows: str, way: str) -> Example:
    extras = {
        "env_id": "FrozenLake-v1",
        "env_kwargs": {"desc": rows.split(), "is_slippery": False},
        "seed": 0,
        "max_turns": 12,
        "reward_range": (0.0, 1.0),
    }
    oracle = [f"<action>{FROZEN_LAKE_ACTIONS[letter]}</action>" for letter in way]
    return Example(prompt=PROMPT, extras=extras, oracle=oracle, env_config={"documentation_chars": 400})


def _make_cart_pole(seed: int) -> Example:
    actions = compute_balancing_actions(seed)
    turns = [actions[i : i + CART_POLE_ACTIONS_PER_TURN] for i in range(0, len(actions), CART_POLE_ACTIONS_PER_TURN)]
    return Example(
        prompt=PROMPT,
        # a pole that is left alone, or pushed by another episode's actions, falls well within 250 steps
        extras={"env_id": "CartPole-v1", "seed": seed, "max_turns": len(turns), "reward_range": (250.0, 500.0)},
        oracle=[f"<action>{json.dumps(turn)}</action>" for turn in turns],
        env_config={"actions_per_turn": CART_POLE_ACTIONS_PER_TURN, "documentation_chars": 0},
    )


def compute_balancing_actions(seed: int) -> list[int]:
    """Actions that keep CartPole-v1's pole up for its 500 steps: push to the side it leans and turns to."""
    env = gymnasium.make("CartPole-v1")
    (position, speed, angle, turning), _ = env.reset(seed=seed)
    actions, over = [], False
    while not over:
        actions.append(int(angle + 0.5 * turning + 0.02 * position + 0.06 * speed > 0))
        (position, speed, angle, turning), _, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    env.close()
    return actions
