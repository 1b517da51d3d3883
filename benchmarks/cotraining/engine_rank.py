"""One rank of a trainer of a pipeline of two: megatron-core's model of a checkpoint, a draft beside it, and the way to an engine.

The ranks tell who started them what happens, over a pipe each: `Loaded`, a `Stepped` per step from the last stage, `Ended`; or an
error's text.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from benchmarks.cotraining.engine_rollouts import Rollout, Rows, Step, steps_of
from benchmarks.cotraining.megatron_cpu import Shape, build_chunks, parallel, stand_in_for_cuda
from benchmarks.sync.weights import digests
from trainer_bridge import connect
from trainer_bridge.adapters import load_megatron, megatron_weights, module_weights
from trainer_bridge.adapters.views.megatron import megatron_policy, megatron_schedule
from trainer_bridge.cotrain.options import CoTrainOptions
from trainer_bridge.cotrain.run import CoTraining
from trainer_bridge.cotrain.trainer import DraftCoTrainer
from trainer_bridge.draft import checkpoint, products, registry
from trainer_bridge.draft.interface import TargetSpec
from trainer_bridge.errors import BridgeError, ConfigError
from vllm_specdraft.drafts import INDEX, read_target

STAGES = 2
_COLLECTIVE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the trainer is to do."""

    engine: str
    """URL of the engine that gets what was trained."""
    version: int
    """Policy version that it becomes there."""
    target: Path
    """Hugging Face directory of the policy, in fp32."""
    draft: Path
    """Checkpoint of the draft to begin with."""
    out: Path
    """New directory for the trained policy."""
    rollouts: Sequence[Rollout]
    documents: int
    """Of a microbatch."""
    microbatches: int
    """Of a step."""
    epochs: int
    learning_rate: float
    """AdamW's, of the policy."""
    draft_learning_rate: float
    warmup_steps: int
    """Of the draft."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A rank has its weights, and gave them back."""

    same: tuple[str, ...]
    """Tensors that it gave bit by bit as they are in the checkpoint."""
    different: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One step, by the last stage."""

    step: int
    of: int
    loss: float
    """Of the policy: negative log-likelihood, weighted by advantages."""
    answer_nll: float
    """Mean negative log-likelihood of answer tokens, in nats: about the policy's entropy while the answers are its own."""
    draft_loss: float
    """Nats per label, summed over passes."""
    labels: int
    """Of the draft, all passes together."""
    seconds: float
    draft_seconds: float
    """Of those, what the rank spent on the draft."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank has trained, saved and sent its share."""

    digests: dict[str, str]
    """Of its tensors, by name in the checkpoint."""
    embedding_digest: str
    """Of its copy of the embedding; empty where embedding and head are two."""
    draft_version: int
    """That the engine serves now."""
    update_s: float
    sent_bytes: int
    save_s: float


def run(rank: int, port: int, order: Order, pipe: Connection) -> None:
    """The process of one rank. `port`: of the rendezvous store, which is the parent's."""
    # A terminal's Ctrl-C comes to all processes: who started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    wait = timedelta(seconds=_COLLECTIVE_S)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES, timeout=wait)
        stand_in_for_cuda()
        with parallel(pipeline=STAGES):
            _train(order, pipe)
        dist.destroy_process_group()
    except (BridgeError, RuntimeError, ValueError, OSError, ImportError, AssertionError) as error:
        # Where the parent is gone too, nobody has to hear of it.
        with contextlib.suppress(OSError):
            pipe.send(f"rank {rank}: {type(error).__name__}: {error}")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Megatron's shape of a Hugging Face config. Raises `ConfigError` for scaled rotary positions."""
    spec = TargetSpec.from_config(config)
    if spec.rope_scaling or spec.rope_theta != int(spec.rope_theta):
        raise ConfigError(f"rotary positions of {config.get('rope_parameters', spec.rope_theta)}: only plain ones are built here")
    return Shape(
        layers=spec.num_layers, hidden=spec.hidden_size, heads=spec.num_heads, groups=spec.num_kv_heads, head_dim=spec.head_dim,
        ffn=spec.intermediate_size, vocab=spec.vocab_size, tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=config["model_type"] == "qwen2", qk_layernorm=config["model_type"] == "qwen3", eps=spec.rms_norm_eps,
        rope_base=int(spec.rope_theta),
    )  # fmt: skip


def first_stage(shape: Shape) -> int:
    """Layers of the first of two stages of equal work, the second of which has the head.

    >>> first_stage(Shape(layers=30, hidden=576, heads=9, groups=3, head_dim=64, ffn=1536, vocab=49152))
    19
    """
    layer = shape.hidden * (3 * shape.ffn + 2 * shape.head_dim * (shape.heads + shape.groups))
    return min(shape.layers - 1, round((shape.layers + shape.hidden * shape.vocab / layer) / 2))


class Policy:
    """This rank's stage of the policy, and its optimizer."""

    def __init__(self, order: Order) -> None:
        """Build it and load the checkpoint. Raises `BridgeError`."""
        config, self._tensors = read_target(order.target)
        self._shape = shape = shape_of(config)
        self.vocab_size = shape.vocab
        self.chunks = build_chunks(shape, pipeline=STAGES, num_layers_in_first_pipeline_stage=first_stage(shape))
        load_megatron(self.chunks, self._tensors, vocab_size=self.vocab_size)
        self._optimizer = torch.optim.AdamW(self.chunks[0].parameters(), lr=order.learning_rate, weight_decay=0.0)
        self._microbatches = order.microbatches

    def weights(self) -> dict[str, torch.Tensor]:
        """What this rank gives, named as in the checkpoint. Whole tensors: they are not split between ranks."""
        given: dict[str, torch.Tensor] = {}
        for name, entry in megatron_weights(self.chunks, vocab_size=self.vocab_size):
            assert isinstance(entry, torch.Tensor)
            given[name] = entry
        return given

    def compared(self) -> Loaded:
        """Whether it gives what it was given."""
        equal = {name: torch.equal(tensor, self._tensors[name]) for name, tensor in self.weights().items()}
        same = tuple(name for name, is_same in equal.items() if is_same)
        return Loaded(same=same, different=tuple(equal.keys() - set(same)))

    def forward_backward(self, step: Step) -> tuple[float, float]:
        """Gradients of one step by megatron's 1F1B; the loss and answer tokens' mean negative log-likelihood, on the last stage."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        documents, length = step[0].token_ids.shape
        positions = torch.arange(length).expand(documents, -1)
        hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)

        def forward(rows: Iterator[Rows], model: nn.Module) -> tuple[torch.Tensor, Any]:
            one = next(rows)

            def loss(nll: torch.Tensor) -> tuple[torch.Tensor, tuple[float, float]]:
                weighted = (nll * one.weights).sum()
                of_answers = nll.detach()[one.generated.roll(-1, 1)].sum()
                # The schedule divides by the number of microbatches; the weights have done so.
                return weighted * len(step), (float(weighted.detach()), float(of_answers))

            return model(one.token_ids, positions, hidden, labels=one.labels), loss

        self._optimizer.zero_grad(set_to_none=True)
        sums = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(step), model=self.chunks[0], num_microbatches=len(step),
            seq_length=length, micro_batch_size=documents, forward_only=False,
        )  # fmt: skip
        tokens = sum(int(rows.generated.sum()) for rows in step)
        return sum(loss for loss, _ in sums), sum(nll for _, nll in sums) / tokens

    def optimize(self) -> None:
        """AdamW, after the gradients of both copies of a tied embedding were added, so that the copies stay one."""
        if (weight := self.tied()) is not None:
            from megatron.core import parallel_state

            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())
        self._optimizer.step()

    def tied(self) -> nn.Parameter | None:
        """This rank's copy of an embedding that is the head too."""
        model: Any = self.chunks[0]
        return model.shared_embedding_or_output_weight() if self._shape.tied else None


def _train(order: Order, pipe: Connection) -> None:
    """All of it, on this rank."""
    policy, rank = Policy(order), dist.get_rank()
    pipe.send(policy.compared())
    steps = steps_of(
        order.rollouts, documents=order.documents, microbatches=order.microbatches, epochs=order.epochs, seed=order.seed
    )  # fmt: skip
    view = megatron_policy(policy.chunks, vocab_size=policy.vocab_size)
    draft = None
    if view.head is not None:
        kind = registry.of_config(checkpoint.read_config(order.draft))
        options = CoTrainOptions(learning_rate=order.draft_learning_rate, warmup_steps=order.warmup_steps, seed=order.seed)
        draft = DraftCoTrainer(kind, kind.load(order.draft)[0], options, view.groups, product_dtype=products.fastest())
    co = CoTraining(
        view, tap_layers=_tap_layers(order.draft), schedule=megatron_schedule(order.microbatches), draft=draft,
        max_rows=max(step[0].token_ids.numel() for step in steps),
    )  # fmt: skip
    for number, step in enumerate(steps, 1):
        began = time.perf_counter()
        with co.step([rows.microbatch for rows in step]):
            loss, answer_nll = policy.forward_backward(step)
        policy.optimize()
        if (result := co.result) is not None:
            pipe.send(
                Stepped(
                    step=number, of=len(steps), loss=loss, answer_nll=answer_nll, draft_loss=result.loss, labels=sum(result.labels),
                    seconds=time.perf_counter() - began, draft_seconds=result.seconds,
                )
            )  # fmt: skip
    co.close()
    began = time.perf_counter()
    _save(policy, order, rank)
    save_s = time.perf_counter() - began
    tied = policy.tied()
    with connect(order.engine, rank=rank, world=STAGES) as bridge:
        with bridge.update(version=order.version) as update:
            update.target(megatron_weights(policy.chunks, vocab_size=policy.vocab_size))
            if draft is not None:
                update.draft(module_weights(draft.model))
        assert update.result is not None
        (version,) = update.result.draft_versions.values()
        pipe.send(
            Ended(
                digests=digests(policy.weights()), embedding_digest=digests({"": tied.detach()})[""] if tied is not None else "",
                draft_version=version, update_s=update.result.seconds, sent_bytes=update.result.sent_bytes, save_s=save_s,
            )
        )  # fmt: skip


def _tap_layers(draft: Path) -> tuple[int, ...]:
    config = checkpoint.read_config(draft)
    return registry.of_config(config).tap_layers(config)


def _save(policy: Policy, order: Order, rank: int) -> None:
    """Each rank its share as one file, the first one their index and all that is not weights."""
    file = f"model-{rank + 1:05d}-of-{STAGES:05d}.safetensors"
    if rank == 0:
        order.out.mkdir(parents=True)
        for other in order.target.iterdir():
            if other.is_file() and not other.name.endswith((".safetensors", ".safetensors.index.json")):
                shutil.copy(other, order.out)
    dist.barrier()
    given = {name: tensor.clone() for name, tensor in policy.weights().items()}
    save_file(given, order.out / file, metadata={"format": "pt"})
    shares: list[Any] = [None] * STAGES
    dist.all_gather_object(shares, (file, sum(tensor.nbytes for tensor in given.values()), sorted(given)))
    if rank == 0:
        names = {name: share for share, _, held in shares for name in held}
        index = {"metadata": {"total_size": sum(size for _, size, _ in shares)}, "weight_map": names}
        (order.out / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    dist.barrier()
