"""The engine's parameters: updated in place, put to sleep, checked. Knows nothing of requests and threads."""

import time

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.native.packed_linear import drop_packed, pack_linears
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.checksum import checksum_of
from skyrl_train.weight_sync.receiver import WeightReceiver


class EngineWeights:
    """A model's named parameters and their way in. Tied parameters have one name, as `named_parameters` gives it.

    Args:
        update_timeout_seconds: how long an update may stay open. While it is, the weights are half old, half new, and
            nothing is generated.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, update_timeout_seconds: float):
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._device = device
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._receiver: WeightReceiver | None = None
        self._dropped: set[str] = set()
        self._asleep = False
        self._update_timeout = update_timeout_seconds
        self._update_deadline: float | None = None

    @property
    def asleep(self) -> bool:
        return self._asleep

    @property
    def updating(self) -> bool:
        """True between the first chunk of an update and its end."""
        return self._update_deadline is not None

    @property
    def complete(self) -> bool:
        """False after a sleep of level 2, until every parameter came in again."""
        return not self._dropped

    def seconds_left(self) -> float:
        """Until the open update is given up; infinite if none is open.

        Raises:
            WeightSyncError: the time is over.
        """
        if self._update_deadline is None:
            return float("inf")
        left = self._update_deadline - time.monotonic()
        if left <= 0:
            raise WeightSyncError(
                f"a weight update was begun but not finished within {self._update_timeout:g} seconds "
                "(update_timeout_seconds); the sender has probably died"
            )
        return left

    def connect(self, init_info: WeightSyncInitInfo) -> None:
        """Meets the trainer; a former connection is closed."""
        self.close()
        self._receiver = WeightReceiver(init_info, self._device)

    def update(self, request: WeightUpdateRequest) -> None:
        """Copies one chunk into the parameters, converting to their dtype; copies nothing if a name or shape is wrong.

        Raises:
            WeightSyncError: no connection, sleeping weights, an unknown name, a wrong shape, bytes that do not fit.
        """
        if self._receiver is None:
            raise WeightSyncError("weights arrived before init_weight_update_communicator was called")
        if self._asleep:
            raise WeightSyncError("weights arrived while the engine's weights sleep; call wake_up(['weights']) first")
        self._update_deadline = time.monotonic() + self._update_timeout
        received = self._receiver.receive(request)
        for name, tensor in received:
            self._check(name, tensor)
        with torch.inference_mode():
            for name, tensor in received:
                self._parameters[name].copy_(tensor)
                self._dropped.discard(name)

    def finish_update(self) -> int:
        """Ends the update; returns the checksum of the parameters as they are now.

        Raises:
            WeightSyncError: parameters dropped by a sleep of level 2 are still missing.
        """
        if self._dropped:
            names = ", ".join(sorted(self._dropped)[:3])
            raise WeightSyncError(
                f"{len(self._dropped)} parameters dropped by sleep(level=2) did not come back, such as {names}; "
                "send the whole model"
            )
        pack_linears(self._model)
        self._update_deadline = None
        return checksum_of(self._parameters.items())

    def sleep(self, level: int) -> None:
        """1: to host memory (where they stay if they are there). 2: dropped."""
        for parameter in self._parameters.values():
            if level == 1:
                parameter.data = parameter.data.to("cpu")
            else:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        if level == 2:
            self._dropped = set(self._parameters)
            drop_packed(self._model)
        self._asleep = True

    def wake_up(self) -> None:
        """Memory for the parameters on the engine's device again, with their values after a sleep of level 1."""
        for name, parameter in self._parameters.items():
            if name in self._dropped:
                parameter.data = torch.zeros(self._shapes[name], dtype=parameter.dtype, device=self._device)
            else:
                parameter.data = parameter.data.to(self._device)
        self._asleep = False

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._parameters:
            raise WeightSyncError(
                f"the engine's model has no parameter {name!r} (it has {len(self._parameters)}, such as "
                f"{next(iter(self._parameters))!r}); trainer and engine must load the same model"
            )
        if tensor.shape != self._shapes[name]:
            raise WeightSyncError(
                f"parameter {name!r} has shape {tuple(self._shapes[name])} in the engine; got {tuple(tensor.shape)}"
            )
