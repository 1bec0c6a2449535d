"""Settings of on-policy distillation (`python -m skyrl_train.entrypoints.main_distill`)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from skyrl_train.config.base import BaseConfig
from skyrl_train.config.bounds import Above, AtLeast


@dataclass(kw_only=True)
class TeacherConfig(BaseConfig):
    """One teacher. Its model runs in training workers like the reference model, unless `engines` or `urls` is set."""

    model: str = ""
    """Folder or hub name of the model."""

    data_sources: list[str] | None = None
    """`data_source` values of the rows that it teaches. null: all that no other teacher lists."""

    engines: int = 0
    """Number of rollout engines (`generator.backend`) to start for it. 0: training workers."""

    urls: list[str] = field(default_factory=list)
    """URLs of externally started servers of the teacher, used instead of workers and engines."""


@dataclass(kw_only=True)
class DistillationConfig(BaseConfig):
    """On-policy distillation: the policy (student) generates, and a teacher scores each of its tokens. Read by
    `main_distill`; docs/distillation.md has the formulas."""

    teachers: dict[str, TeacherConfig] = field(default_factory=dict)
    """Teachers by a name of your choice, each with `model` and optionally `data_sources` (of the rows that it teaches),
    `engines` (started for it; 0: training workers) or `urls` (of remote servers). All share the student's
    vocabulary."""

    tokens: Literal["sampled", "top_k", "full"] = "sampled"
    """Tokens compared at each position. `sampled`: the generated token; its log-ratio is its advantage. `top_k`: the
    teacher's `top_k` most likely tokens, and all others as one outcome. `full`: the vocabulary. The last two add the KL
    divergence to the loss."""

    kl: Literal["reverse", "forward"] = "reverse"
    """`reverse`: KL(student || teacher), mode-seeking. `forward`: KL(teacher || student), mass-covering; not with
    `tokens=sampled`."""

    top_k: Annotated[int, AtLeast(1)] = 32
    """K of `tokens=top_k`."""

    coef: Annotated[float, Above(0)] = 1.0
    """Weight of the divergence."""

    reward_coef: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the advantages of the environments' rewards. 0: the teacher alone trains."""

    memory_gb: Annotated[float, Above(0)] = 16.0
    """Bound on the host memory (GB) of the teachers' log-probs of one training batch, with `top_k` and `full`; a run
    that may need more is rejected at start."""

    @property
    def is_on(self) -> bool:
        return bool(self.teachers)

    @property
    def rewards_tokens(self) -> bool:
        """Whether sampled tokens get advantages from the teacher."""
        return self.is_on and self.tokens == "sampled"
