"""megatron-core's real models and pipeline schedules in gloo processes on the CPU.

megatron-core asks CUDA for its device, its streams and its random numbers, and needs none of them for models of torch modules.
`stand_in_for_cuda` sends those calls to the CPU; it changes torch for good, so call it in spawned processes only. `parallel` makes
the groups, `build_chunks` the rank's models, `logits_of` runs megatron's own schedule over them:

    stand_in_for_cuda()
    with parallel(tensor=2, pipeline=1):
        chunks = build_chunks(Shape(tied=True), tensor=2, pipeline=1)
        ...

megatron-core is imported where it is used. It is an optional development dependency: ``pip install --no-deps megatron-core`` beside
numpy, packaging and einops; tried with 0.16.1.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every ``device="cuda"`` and ``.cuda()`` to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


@functools.cache
def stand_in_for_cuda() -> None:
    """Let megatron-core run on the CPU in this process, until its end. May be called again."""
    # It says of each optional package that it is missing.
    warnings.filterwarnings("ignore", module="megatron")
    import megatron.core.tensor_parallel.random as megatron_random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None  # type: ignore[assignment]
    # Only dropout and initialization on the GPU draw from its generators.
    megatron_random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(0)
    megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None
    _CudaMeansCpu().__enter__()


@contextlib.contextmanager
def parallel(*, tensor: int = 1, pipeline: int = 1, virtual: int = 1) -> Iterator[None]:
    """Megatron's groups for the length of a block. What is left of the world is data parallel.

    Ranks are counted through tensor parallelism first, then data parallelism, then the pipeline.
    """
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        # A second set for the CPU, beside those of a GPU.
        create_gloo_process_groups=False,
    )
    # Some twenty of them, and megatron-core leaves them behind: the threads of each slow down all that comes after.
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    try:
        yield
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        for group in groups:
            dist.destroy_process_group(group)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model like Llama, Qwen2 (`qkv_bias`) or Qwen3 (`qk_layernorm`); by default a tiny one."""

    layers: int = 4
    hidden: int = 16
    heads: int = 4
    groups: int = 2
    """Key heads."""
    head_dim: int = 4
    ffn: int = 24
    vocab: int = 32
    """Rows of the vocabulary, padding included."""
    tied: bool = False
    qkv_bias: bool = False
    qk_layernorm: bool = False
    eps: float = 1e-5
    rope_base: int = 500
    """Turns even slow channels visibly within a few tokens."""


def config_of(shape: Shape, *, tensor: int = 1, pipeline: int = 1, virtual: int = 1, dtype: torch.dtype, **fields: Any) -> Any:
    """Megatron's ``TransformerConfig``. `fields`: further ones of it, or other values."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**{
        "num_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_query_groups": shape.groups, "kv_channels": shape.head_dim, "ffn_hidden_size": shape.ffn,
        "add_bias_linear": False, "add_qkv_bias": shape.qkv_bias, "qk_layernorm": shape.qk_layernorm,
        "normalization": "RMSNorm", "layernorm_epsilon": shape.eps, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "params_dtype": dtype, "pipeline_dtype": dtype, "use_cpu_initialization": True,
        # With two ranks, activations and gradients of one batch of transfers would be taken for each other.
        "overlap_p2p_comm": virtual > 1, "batch_p2p_comm": virtual == 1,
        # Kernels that only a GPU has.
        "masked_softmax_fusion": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False, **fields,
    })  # fmt: skip


def build_chunks(
    shape: Shape, *, tensor: int = 1, pipeline: int = 1, virtual: int = 1, dtype: torch.dtype = torch.float32, **fields: Any
) -> list[nn.Module]:
    """This rank's ``GPTModel``: one per virtual pipeline stage. Inside of `parallel`, with the same sizes.

    Args:
        fields: of ``TransformerConfig``: ``num_layers_in_first_pipeline_stage=3`` makes stages uneven.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(shape, tensor=tensor, pipeline=pipeline, virtual=virtual, dtype=dtype, **fields)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_layernorm)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return [
        GPTModel(
            config, spec, vocab_size=shape.vocab, max_sequence_length=64, position_embedding_type="rope",
            rotary_base=shape.rope_base, share_embeddings_and_output_weights=shape.tied,
            pre_process=stage == 0 and chunk == 0, post_process=stage == pipeline - 1 and chunk == virtual - 1,
            vp_stage=chunk if virtual > 1 else None,
        ).to(dtype)
        for chunk in range(virtual)
    ]  # fmt: skip


def logits_of(chunks: list[nn.Module], ids: torch.Tensor) -> torch.Tensor | None:
    """Logits of a model that may be cut over ranks, run by megatron's own schedule without a backward pass.

    Args:
        chunks: from `build_chunks`; all ranks call this.
        ids: [samples, tokens]; each sample is a microbatch. Interleaved schedules want a multiple of the pipeline's size.

    Returns:
        [samples, tokens, vocabulary] on the ranks of the last stage, the vocabulary gathered; None on the others.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    samples, length = ids.shape
    positions = torch.arange(length)[None]
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)

    def forward_step(iterator: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Any]:
        return model(next(iterator)[None], positions, hidden), lambda output, non_loss_data: output.detach()

    found = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(ids) for _ in chunks] if len(chunks) > 1 else iter(ids),
        model=chunks if len(chunks) > 1 else chunks[0], num_microbatches=samples, seq_length=length, micro_batch_size=1,
        forward_only=True, collect_non_loss_data=True,
    )  # fmt: skip
    if not found:
        return None
    mine, group = torch.cat(found), parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts, -1)
