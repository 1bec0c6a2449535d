from skyrl_train.inference_engines.sglang.arguments import build_command_line


def test_flags_match_launcher_syntax() -> None:
    arguments = {"tp_size": 2, "enable_lora": True, "disable_radix_cache": False, "lora_paths": ["a"], "revision": None}
    assert build_command_line(arguments) == ["--tp-size", "2", "--enable-lora", "--lora-paths", "a"]
