"""The step plan: arithmetic one can check by hand."""

import pytest
import torch

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.models import LoRAConfig
from skyrl_train.step_plan import ModelPlan, ModelShape, StepPlan, model_shape, step_plan


def settings(**overrides: object) -> SkyRLConfig:
    """8 prompts x 3 samples a step in two mini-batches of 12 samples, no KL term, one worker."""
    plain: dict[str, object] = {
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 4,
        "trainer.critic_mini_batch_size": 8,
        "generator.n_samples_per_prompt": 3,
        "trainer.algorithm.use_kl_loss": False,
        "generator.max_input_length": 60,
        "generator.sampling_params.max_generate_length": 40,
        "trainer.logprobs_chunk_size": 10,
    }
    cfg = SkyRLConfig()
    for name, value in (plain | overrides).items():
        *sections, field = name.split(".")
        section = cfg
        for part in sections:
            section = getattr(section, part)
        setattr(section, field, value)
    return cfg


def model_plan(plan: StepPlan, name: str) -> ModelPlan:
    return next(model for model in plan.models if model.name == name)


def memory(plan: StepPlan, phase: str) -> dict[str, int]:
    return next(estimate.parts for estimate in plan.memory if estimate.phase == phase)


def test_a_step_is_divided_into_mini_batches_shares_and_micro_batches():
    cfg = settings(**{
        "trainer.placement.policy_num_gpus_per_node": 4,
        "trainer.policy.sequence_parallel_size": 2,
        "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 3,
        "trainer.update_epochs_per_batch": 2,
    })  # fmt: skip
    policy = model_plan(step_plan(cfg), "policy")
    # 12 samples a mini-batch over 4 workers / 2 = 2 ranks: 6 each, in micro-batches of 2. (Those of 3 are for others.)
    assert policy == ModelPlan(
        "policy", 2, 2, 4, 12, 6, micro_batches=3, dummy_micro_batches=0, forward_micro_batches=2 * 3
    )


def test_uneven_shares_are_filled_up():
    cfg = settings(**{"trainer.placement.policy_num_gpus_per_node": 5, "trainer.micro_train_batch_size_per_gpu": 2})
    policy = model_plan(step_plan(cfg), "policy")
    # 12 samples over 5 ranks: 3, 3, 2, 2, 2; in micro-batches of 2: 2, 2, 1, 1, 1. Three ranks compute a dummy.
    assert (policy.samples_a_rank, policy.micro_batches, policy.dummy_micro_batches) == (3, 2, 3)
    assert "3 dummy micro-batches" in str(step_plan(cfg))


def test_prompts_that_fill_no_batch_are_counted():
    plan = step_plan(settings(**{"trainer.epochs": 3}), num_prompts=30)
    assert (plan.num_steps, plan.prompts_left_out) == (9, 6)  # 3 batches of 8 an epoch
    assert "left out: 6 prompts an epoch" in str(plan)
    assert "9 training steps; optimizer steps: 18 of the policy" in str(plan)
    assert step_plan(settings(**{"trainer.epochs": 3, "trainer.max_training_steps": 4}), num_prompts=30).num_steps == 4


def test_nothing_is_said_to_be_left_out_where_nothing_is():
    assert "left out" not in str(step_plan(settings(), num_prompts=32))


def test_a_token_budget_decides_the_size_of_micro_batches():
    cfg = settings(**{"trainer.max_tokens_per_microbatch": 450})
    # Samples have up to 60 + 40 tokens: at least 4 fit. 12 / 4 = 3.
    assert model_plan(step_plan(cfg), "policy").micro_batches == 3
    assert "at most 450 tokens" in str(step_plan(cfg))
    # One longer than the budget has a micro-batch of its own.
    cfg = settings(**{"trainer.max_tokens_per_microbatch": 50})
    assert model_plan(step_plan(cfg), "policy").micro_batches == 12


def test_one_update_a_step_needs_no_forward_pass_before_it():
    cfg = settings(**{"trainer.policy_mini_batch_size": 8})
    assert model_plan(step_plan(cfg), "policy").forward_micro_batches == 0
    cfg.trainer.update_epochs_per_batch = 2
    assert model_plan(step_plan(cfg), "policy").forward_micro_batches == 24


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ("response", "from 0 to 1 between response tokens 20 and 40"),
        ("context", "from 0 to 1 between tokens 80 and 100 of prompt and response; after a prompt of 60 tokens it"),
    ],
)
def test_plan_says_where_the_overlong_penalty_begins_and_ends(counts: str, said: str):
    buffer = {"trainer.algorithm.overlong_buffer.len": 20, "trainer.algorithm.overlong_buffer.counts": counts}
    assert said in str(step_plan(settings(**buffer)))
    assert "overlong" not in str(step_plan(settings()))


def test_critic_and_reference_are_planned_if_there_are_any():
    assert [model.name for model in step_plan(settings()).models] == ["policy"]
    cfg = settings(**{"trainer.critic.model.path": "somewhere", "trainer.algorithm.use_kl_loss": True})
    critic, reference = model_plan(step_plan(cfg), "critic"), model_plan(step_plan(cfg), "reference")
    assert (critic.optimizer_steps, critic.samples_a_mini_batch, critic.forward_micro_batches) == (1, 24, 24)
    assert (reference.optimizer_steps, reference.micro_batches, reference.forward_micro_batches) == (0, 0, 24)


def test_memory_of_learning_by_hand():
    cfg = settings(**{"trainer.placement.policy_num_gpus_per_node": 2, "generator.model_dtype": "bfloat16"})
    shape = ModelShape(1000, hidden_size=5, num_layers=4, vocab_size=11)
    plan = step_plan(cfg, policy=shape)
    assert memory(plan, "generate (an engine)") == {"weights": 2000}
    assert memory(plan, "train policy") == {
        "weights": 4 * 1000 // 2,
        "gradients": 4 * 1000 // 2,
        "Adam": 8 * 1000 // 2,
        "gathered": 2 * 2 * 1000 // 4,  # two of four layers in bfloat16
        "logits": 8 * 10 * 11,
        "activations": 2 * 100 * 5 * (4 + 17),
    }
    cfg.trainer.gradient_checkpointing = False
    assert memory(step_plan(cfg, policy=shape), "train policy")["activations"] == 2 * 100 * 5 * 4 * 17


def test_adapters_alone_have_gradients_and_optimizer_state():
    parts = memory(step_plan(settings(), policy=ModelShape(1000, num_trainable=50)), "train policy")
    assert (parts["weights"], parts["gradients"], parts["Adam"]) == (4200, 200, 400)


def test_unknown_sizes_are_not_estimated():
    assert step_plan(settings()).memory == ()
    assert "logits" not in memory(step_plan(settings(), 1000), "train policy")
    assert "ESTIMATES" in str(step_plan(settings(), 1000))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    """The config of a one-layer model, without any weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def test_the_shape_of_a_model_comes_from_its_config_alone(llama):
    # Embedding and output 2 x 11 x 8; attention q 8x8, k and v 8x4, o 8x8; mlp 3 x 8x12; three norms of 8.
    expected = 2 * 88 + (64 + 32 + 32 + 64) + 3 * 96 + 3 * 8
    assert model_shape(llama) == ModelShape(expected, None, 8, 1, 11)
    assert model_shape(llama, is_critic=True) == ModelShape(expected - 88, None, 8, 1, None)
    assert model_shape(llama, overrides={"intermediate_size": 13}).num_parameters == expected + 3 * 8


def test_adapters_are_counted_as_peft_makes_them(llama):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    for target in ("all-linear", ["q_proj", "down_proj"]):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama))
            adapted = get_peft_model(model, LoraConfig(r=3, target_modules=target))
        trainable = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
        assert model_shape(llama, lora=LoRAConfig(rank=3, target_modules=target)).num_trainable == trainable
