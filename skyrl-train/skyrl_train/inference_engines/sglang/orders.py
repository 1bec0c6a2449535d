"""Commands to our weight loader in a local SGLang server: sent through its route for tensors, results returned in
files.
"""

import base64
import io
import itertools
import json
from dataclasses import asdict, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing  # teaches ForkingPickler tensors

from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.remote.connection import ServerConnection, ServerRefused
from skyrl_train.inference_engines.remote.protocol import ServerFacts
from skyrl_train.inference_engines.remote.sglang import SGLangProtocol
from skyrl_train.inference_engines.sglang.weight_loader import NAME
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest


class LocalSGLangProtocol(SGLangProtocol):
    """Protocol of a server started by this run with our weight loader: weights over every transport.

    Args:
        folder: folder for results
        node: name of this machine
    """

    def __init__(self, connection: ServerConnection, request_timeout_seconds: float, *, folder: Path, node: str):
        super().__init__(connection, request_timeout_seconds)
        self._folder = folder
        self._node = node
        self._num_processes = 1
        self._numbers = itertools.count()

    async def get_facts(self) -> ServerFacts:
        facts = await super().get_facts()
        self._num_processes = facts.info.num_weight_processes
        unsupported = {feature: why for feature, why in facts.info.unsupported.items() if feature != "broadcast"}
        return replace(facts, info=replace(facts.info, unsupported=unsupported, node=self._node))

    async def init_weight_transfer(self, info: WeightSyncInitInfo) -> None:
        await self._start_update()
        await self._send_order(info.timeout_seconds, do="connect", info=asdict(info))
        await self.server.post("/end_weight_update", {})

    async def update_weights(self, request: WeightUpdateRequest) -> None:
        if request.index == 0:
            await self._start_update()
        await self._send_order(None, do="update", request=request.to_json_dict())

    async def apply_weights(self, version: int) -> WeightReport:
        fingerprints = await self._send_order(None, do="finish", version=version)
        await self.server.post("/end_weight_update", {})
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.server.post("/update_weight_version", body)
        return WeightReport(version=version, fingerprints=fingerprints, received_only=list(fingerprints))

    async def _start_update(self) -> None:
        """Start an update, unless a failed one is still open."""
        body = {"selector": "target"}
        try:
            await self.server.post("/begin_weight_update", body)
        except ServerRefused:
            await self.server.post("/end_weight_update", {})
            await self.server.post("/begin_weight_update", body)

    async def _send_order(self, timeout_seconds: float | None, **order: object) -> dict[str, int]:
        """Execute a command in every process of the server. Returns the fingerprints of one (all are equal)."""
        number = next(self._numbers)
        answers = [self._folder / f"{number}_{index}.json" for index in range(self._num_processes)]
        orders = [
            _pack_text(json.dumps(order | {"answer": str(answer), "process_index": index}))
            for index, answer in enumerate(answers)
        ]
        body = {"serialized_named_tensors": orders, "load_format": NAME, "flush_cache": False, "selector": "target"}
        try:
            await self.server.post("/update_weights_from_tensor", body, timeout_seconds=timeout_seconds)
        except ServerRefused as error:
            raise WeightSyncError(f"the SGLang server at {self.server.url} refused an update: {error.said}") from None
        reports = [json.loads(answer.read_text()) for answer in answers]
        for answer in answers:
            answer.unlink()
        for index, report in enumerate(reports):
            if "error" in report:
                raise WeightSyncError(f"process {index} of the SGLang server at {self.server.url}: {report['error']}")
            if report != reports[0]:
                raise WeightSyncError(f"the processes of the SGLang server at {self.server.url} got different weights")
        return reports[0]["fingerprints"]


def _pack_text(text: str) -> str:
    """Pack `text` as the name of an empty tensor, in the format of SGLang's route."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(text, torch.empty(0))])
    return base64.b64encode(buffer.getvalue()).decode()
