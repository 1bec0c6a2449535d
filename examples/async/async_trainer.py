"""The trainer of one-step-off training, under its name in other SkyRL releases."""

from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer as AsyncRayPPOTrainer

__all__ = ["AsyncRayPPOTrainer"]
