"""Can an environment be cheated? Plays policies that know nothing against it, and the oracle, and compares.

From a shell: `python -m skyrl_gym.audit gsm8k search`.
"""

from skyrl_gym.audit.cheats import Cheat, cheats_for
from skyrl_gym.audit.report import AuditReport, PolicyOutcome
from skyrl_gym.audit.services import services_for
from skyrl_gym.audit.trial import audit

__all__ = ["AuditReport", "Cheat", "PolicyOutcome", "audit", "cheats_for", "services_for"]
