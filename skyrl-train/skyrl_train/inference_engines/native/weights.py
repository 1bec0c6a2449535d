"""Parameters of the engine: in-place updates, sleep and fingerprints. Independent of requests and threads."""

import time

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.native.packed_linear import drop_packed, find_stale_copies, pack_linears
from skyrl_train.models.persistent_buffers import iter_persistent_buffers
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import Verification, VerificationSample, fingerprints_of, num_bytes_read
from skyrl_train.weight_sync.receiver import WeightReceiver


class EngineWeights:
    """Named parameters of a model and their updates. Tied parameters have one name, the one of `named_parameters`.
    Buffers in checkpoints, such as routing biases, count as parameters.

    Buckets are written in place, so an update that fails after its first bucket leaves mixed weights. Generation then
    stops until an update has sent these parameters again.

    Args:
        update_timeout_seconds: maximum duration of an update. During it, weights are mixed and nothing is generated.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, update_timeout_seconds: float):
        self._model = model
        self._parameters: dict[str, torch.Tensor] = {
            **dict(model.named_parameters()),
            **dict(iter_persistent_buffers(model)),
        }
        self._device = device
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._receiver: WeightReceiver | None = None
        self._init_info = WeightSyncInitInfo(transport="shared_memory")
        self._owed: set[str] = set()
        self._because = ""
        self._written: set[str] = set()
        self._complete = True
        self._asleep = False
        self._update_timeout = update_timeout_seconds
        self._update_deadline: float | None = None
        self._failure = ""

    @property
    def asleep(self) -> bool:
        return self._asleep

    @property
    def updating(self) -> bool:
        """True between the first bucket of an update and its end, or after a failed update until the next."""
        return self._update_deadline is not None

    @property
    def complete(self) -> bool:
        """False after a level-2 sleep or a partial update, until all affected parameters are received."""
        return self._complete

    @property
    def verification(self) -> Verification:
        """Fraction of a tensor read by its fingerprint, as set by the trainer on connecting."""
        return self._init_info.verification

    def get_seconds_left(self) -> float | None:
        """Return the time until the open update times out; None if no update is open.

        Raises:
            WeightSyncError: the update timed out.
        """
        if self._update_deadline is None:
            return None
        left = self._update_deadline - time.monotonic()
        if left <= 0:
            raise WeightSyncError(
                f"a weight update was begun but not finished within {self._update_timeout:g} seconds "
                f"(update_timeout_seconds); {self._failure or 'the sender has probably died'}"
            )
        return left

    def connect(self, init_info: WeightSyncInitInfo) -> None:
        """Connect to the trainer, replacing a former connection. The first update must contain every parameter."""
        self.close()
        self._receiver = WeightReceiver(init_info, self._device)
        self._init_info = init_info
        if not self._owed:
            self._owed, self._because = set(self._parameters), "a trainer's first update brings all of them"

    def update(self, request: WeightUpdateRequest) -> None:
        """Copy one bucket into the parameters with dtype conversion; nothing is copied if a name or shape is wrong.

        Raises:
            WeightSyncError: no connection, sleeping weights, an unknown name, a wrong shape, or a wrong number of
                bytes.
        """
        receiver = self._get_connection()
        if self._asleep:
            raise WeightSyncError("weights arrived while the engine's weights sleep; call wake_up(['weights']) first")
        if request.index == 0 and self._written:
            self._cancel_update("a new update began before it was finished")
        self._update_deadline = time.monotonic() + self._update_timeout
        try:
            received = receiver.receive(request)
            for name, tensor in received:
                self._check(name, tensor)
        except WeightSyncError as error:
            self._cancel_update(str(error))
            raise
        with torch.inference_mode():
            for name, tensor in received:
                self._parameters[name].copy_(tensor)
                self._written.add(name)
                self._owed.discard(name)

    def finish_update(self, version: int) -> WeightReport:
        """Finish the update, and report the current values of the received parameters.

        Raises:
            WeightSyncError: missing buckets or required parameters (all in a first update or after a level-2 sleep; the
                affected ones after a failed update).
        """
        try:
            self._get_connection().finish(version)
            if self._owed:
                names = ", ".join(sorted(self._owed)[:3])
                raise WeightSyncError(
                    f"{len(self._owed)} parameters did not come, such as {names}, but had to: {self._because}; "
                    "send the whole model"
                )
        except WeightSyncError as error:
            self._cancel_update(str(error))
            raise
        pack_linears(self._model)
        report = self._build_report(version)
        self._written.clear()
        self._update_deadline, self._complete, self._failure = None, True, ""
        return report

    def _build_report(self, version: int) -> WeightReport:
        if self.verification == "off":
            return WeightReport(version=version, fingerprints={})
        held = [(name, parameter) for name, parameter in self._parameters.items() if name in self._written]
        with torch.inference_mode():
            stale = find_stale_copies(self._model, VerificationSample(version, self.verification))
        return WeightReport(
            version=version,
            fingerprints=fingerprints_of(held, version, self.verification),
            wrong={f"{name}.weight": ["the engine's packed copy"] for name in stale},
            held_bytes=sum(parameter.nbytes for _, parameter in held),
            read_bytes=sum(num_bytes_read(parameter.nbytes, self.verification) for _, parameter in held),
        )

    def sleep(self, level: int) -> None:
        """Release the parameters: level 1 moves them to host memory (if not there yet), level 2 drops them."""
        for parameter in self._parameters.values():
            if level == 1:
                parameter.data = parameter.data.to("cpu")
            else:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        if level == 2:
            self._owed, self._because, self._complete = set(self._parameters), "sleep(level=2) dropped them", False
            drop_packed(self._model)
        self._asleep = True

    def wake_up(self) -> None:
        """Allocate the parameters on the engine's device, with their values after a level-1 sleep."""
        for name, parameter in self._parameters.items():
            if not parameter.numel():
                parameter.data = torch.zeros(self._shapes[name], dtype=parameter.dtype, device=self._device)
            else:
                parameter.data = parameter.data.to(self._device)
        self._asleep = False

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _get_connection(self) -> WeightReceiver:
        if self._receiver is None:
            raise WeightSyncError("weights arrived before init_weight_update_communicator was called")
        return self._receiver

    def _cancel_update(self, why: str) -> None:
        """Cancel a failed update. If nothing was written yet, the weights are unchanged."""
        if self._written:
            self._owed |= self._written
            self._because, self._complete = f"they are half of an update that failed ({why})", False
            self._failure = f"it failed ({why}), and was not sent again"
            self._written.clear()
        elif not self._failure:
            self._update_deadline = None

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
