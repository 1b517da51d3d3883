"""Swapping the served draft inside a running engine, as a transaction.

vLLM's layerwise reload is the path (it repacks weights for the CPU kernels), but it is no transaction: it puts every layer on
the meta device at once, also the embedding that the draft shares with the target, and an error inside leaves it half done. So:
shared modules are taken out of the draft's tree first, everything the draft is made of is kept until the new weights passed
a check of the functions they became, and any exception puts the old draft back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vllm_specdraft import methods
from vllm_specdraft.served import fingerprint, fused_into, off_by, tolerance_of
from vllm_specdraft.shards import local_weight


class SwapError(RuntimeError):
    """The new draft did not become what was loaded; the old one serves on."""


def target_digest(model: nn.Module) -> str:
    """Hex digest of every tensor the target still holds (weights that the CPU backend packed away hold none)."""
    import blake3

    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    seen: set[int] = set()
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        if tensor.numel() == 0 or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest(length=16)


class DraftSwap:
    """Swaps the draft of one model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._method = runner, methods.of(runner.vllm_config.speculative_config.method)
        target = runner.get_model()
        self._target_modules = {id(module) for module in target.modules()}
        self._target = target

    @property
    def model(self) -> Any:
        """The drafter's module as vLLM runs it."""
        return self._runner.drafter.model

    def apply(self, state: Mapping[str, torch.Tensor], agree: Callable[[bool], bool] = bool) -> None:
        """Serve `state` (checkpoint names and shapes) from the next step on.

        Args:
            agree: whether the swap succeeded on every rank, given whether it did here; called once, whatever happened.

        Raises `SwapError`, or whatever vLLM raised; then the old draft is back and the target was never written.
        """
        shared: list[tuple[nn.Module, str, nn.Module]] = []
        snapshot: _Snapshot | None = None
        failure: BaseException | None = None
        try:
            before = fingerprint(self._target)
            shared = self._shared()
            for parent, name, _ in shared:
                del parent._modules[name]
            snapshot = _Snapshot(self.model)
            with torch.no_grad():
                self._reload(state)
                self._check(state)
        except BaseException as error:  # noqa: BLE001 - raised again below, once every rank knows of it
            failure = error
        finally:
            for parent, name, module in shared:
                parent._modules[name] = module
        if failure is None and fingerprint(self._target) != before:
            failure = SwapError("the swap touched the target's weights; the old draft is back, restart the engine")
        agreed = False
        try:
            agreed = agree(failure is None)
        finally:
            if not agreed and snapshot is not None:
                snapshot.restore()
        if not agreed:
            raise failure or SwapError("another rank refused the draft; the old one is back on all")

    def _shared(self) -> list[tuple[nn.Module, str, nn.Module]]:
        """Modules in the draft's tree that are the target's own objects: parent, name, module."""
        return [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if id(child) in self._target_modules
        ]

    def _reload(self, state: Mapping[str, torch.Tensor]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        config = self._runner.vllm_config
        with set_current_vllm_config(config):
            initialize_layerwise_reload(self.model)
            self._method.load(self.model, state)
            finalize_layerwise_reload(self.model, config.speculative_config.draft_model_config)
            self._method.derive(self.model, state)

    def _check(self, state: Mapping[str, torch.Tensor]) -> None:
        """Every linear function of the served draft must equal the loaded weights on fixed inputs, every vector its value.

        What no tensor of `state` was meant for keeps old weights, or none: it raises, by name.
        """
        generator = torch.Generator().manual_seed(0)
        used: set[str] = set()
        for name, module, keys in self._functions():
            if absent := [key for key in keys if key not in state]:
                raise SwapError(f"nothing was loaded into {name}: the draft has no {', '.join(absent)}")
            used.update(keys)
            weight = local_weight(module, [state[key] for key in keys])
            x = torch.randn(3, weight.shape[1], generator=generator)
            # Written so that a NaN is refused as well.
            if not (error := off_by(module, x, weight)) <= tolerance_of(x.dtype):
                raise SwapError(f"after the swap {name} is off by {error:.3g}: its weights did not arrive")
        for name, value in self.model.named_parameters():
            key = self._method.checkpoint_name(name)
            # An empty one is a weight that was packed away; its function was checked above.
            if not value.numel() or key in used or fused_into(key):
                continue
            if key not in state:
                raise SwapError(f"nothing was loaded into {name}: the draft has no {key}")
            used.add(key)
            if not torch.equal(value.data[: len(state[key])], state[key].to(value.dtype)):
                raise SwapError(f"after the swap {name} does not hold the loaded values")
        for name, error in self._method.off_by(self.model, state).items():
            if not error <= tolerance_of(self._runner.vllm_config.model_config.dtype):
                raise SwapError(f"after the swap {name} are off by {error:.3g}")
        if missed := sorted(key for key, value in state.items() if value.dim() == 2 and key not in used):
            raise SwapError(f"no served layer takes {missed}")

    def _functions(self) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """Name, served module and the checkpoint names of its weight's rows, for every linear layer of the draft."""
        for name, module in self.model.named_modules():
            if hasattr(module, "quant_method") and hasattr(module, "weight"):
                key = f"{self._method.checkpoint_name(name)}.weight"
                yield name, module, fused_into(key) or (key,)


class _Snapshot:
    """Everything a module tree is made of: tensor objects, their contents, and plain attributes (packed functions)."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module in model.modules():
            plain = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
            self._modules.append((module, plain, dict(module._parameters), dict(module._buffers)))
            for tensor in [*module._parameters.values(), *module._buffers.values()]:
                if tensor is not None and tensor.numel():
                    # The reload writes into these in place.
                    self._contents.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Put everything back."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        with torch.no_grad():
            for tensor, content in self._contents:
                tensor.data.copy_(content)
        for module, plain, parameters, buffers in self._modules:
            children = module._modules
            module.__dict__.clear()
            module.__dict__.update(plain, _modules=children, _parameters=parameters, _buffers=buffers)
            get_layerwise_info(module).reset()
