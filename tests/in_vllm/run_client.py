"""A trainer that uses vLLM's own client and factory, unmodified: ``python -m tests.in_vllm.run_client JSON``.

Arguments: ``url``, ``target`` (checkpoint to send), ``version`` (served now), ``fault`` (what to do wrong), ``draft`` (to send).
Prints one JSON line: the error, if any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.in_vllm import tiny
from vllm_specdraft.weight_transfer import SpecdraftTrainerInitInfo


class DraftClient(HTTPVLLMWeightSyncClient):
    """vLLM's client has no call for drafts; its server has the route."""

    def start_draft_weight_update(self) -> None:
        self._post("start_draft_weight_update")


class FileSource(WeightSource):
    """The tensors of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._tensors = load_file(directory / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())


def main(arguments: dict[str, Any]) -> None:
    client = HTTPVLLMWeightSyncClient(arguments["url"])
    if arguments.get("fault") == "vanish":
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        return
    if draft := arguments.get("draft"):
        init = SpecdraftTrainerInitInfo(rank=0, version=arguments["version"], for_draft=True)
        source = FileSource(Path(draft))
        engine = WeightTransferTrainerFactory.trainer_init(init, client=DraftClient(arguments["url"]), source=source)
    else:
        model = tiny.load(Path(arguments["target"]))
        if arguments.get("fault") == "nan":
            model.model.norm.weight.data[3] = torch.nan
        init = SpecdraftTrainerInitInfo(rank=0, version=arguments["version"])
        engine = WeightTransferTrainerFactory.trainer_init(init, client=client, source=ModuleSource(model))
    engine.send_weights()
    engine.shutdown()


if __name__ == "__main__":
    error = None
    try:
        main(json.loads(sys.argv[1]))
    except Exception as failure:  # noqa: BLE001 - what is raised is what the test looks at
        error = f"{type(failure).__name__}: {failure}"
    sys.stdout.write(json.dumps({"error": error}) + "\n")
