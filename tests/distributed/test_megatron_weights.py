"""Catches weights that leave a Megatron model, or enter it, under a wrong name, in a wrong row, twice or not at all.

Four processes cut megatron-core's own models in every way; each is loaded from a random Hugging Face model. What it gives back
has to be that model bit by bit, and it has to compute the same logits, in fp64: two errors that undo each other, as heads taken
apart and put together in the same wrong order, do not pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cotraining.megatron_cpu import Shape, build_chunks, config_of, logits_of, parallel
from tests.boxes import assert_same, put_together
from tests.distributed.megatron_cpu import NEEDS_MEGATRON, on_megatron_ranks
from tests.tolerances import OPERATOR_FP64, assert_close
from trainer_bridge.adapters.megatron import load_megatron, megatron_weights
from trainer_bridge.errors import WeightSourceError
from trainer_bridge.shards import Entry, Shard

pytestmark = NEEDS_MEGATRON
WORLD = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how four ranks hold it; what the sizes leave over is data parallel."""

    family: str = "Llama"
    shape: Shape
    vocab: int = 29
    """Rows of the vocabulary without padding."""
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    """Of megatron's config."""

    @property
    def sizes(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "pipeline": self.pipeline, "virtual": self.virtual}


CASES = {
    "whole": Case(shape=Shape(layers=2)),
    "whole, tied": Case(shape=Shape(layers=2, tied=True, vocab=29)),
    "tensor parallel": Case(shape=Shape(layers=2, heads=8, head_dim=6), tensor=2),
    "several groups a rank, tied": Case(shape=Shape(layers=2, heads=8, groups=4, tied=True), tensor=2),
    "a key head per head": Case(family="Qwen3", shape=Shape(layers=2, groups=4, qk_layernorm=True), tensor=2),
    "a rank of padding": Case(shape=Shape(layers=2, vocab=64), tensor=2),
    "one group per rank": Case(family="Qwen2", shape=Shape(layers=2, heads=8, groups=4, head_dim=2, qkv_bias=True), tensor=4),
    "two stages, tied": Case(family="Qwen2", shape=Shape(qkv_bias=True, tied=True, groups=1), pipeline=2),
    "uneven stages": Case(shape=Shape(layers=5), pipeline=2, fields={"num_layers_in_first_pipeline_stage": 3}),
    "virtual stages": Case(family="Qwen3", shape=Shape(qk_layernorm=True, head_dim=6), pipeline=2, virtual=2),
    "both, tied": Case(family="Qwen2", shape=Shape(heads=8, groups=4, head_dim=2, qkv_bias=True, tied=True), tensor=2, pipeline=2),
    "all three, tied": Case(
        family="Qwen3", shape=Shape(qk_layernorm=True, tied=True, vocab=64), tensor=2, pipeline=2, virtual=2
    ),
}  # fmt: skip
IDS = torch.randint(0, 29, (2, 11), generator=torch.Generator().manual_seed(3))


def hugging_face(case: Case) -> Any:
    """A model with random weights, norms included, in fp64."""
    import transformers

    shape = case.shape
    config = getattr(transformers, f"{case.family}Config")(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers, vocab_size=case.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.groups, head_dim=shape.head_dim, rms_norm_eps=shape.eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.rope_base)}, tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).double().eval()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * drawn if "norm" in name else 0.3 * drawn)
    return model


def logits_in_fp64(model: Any) -> torch.Tensor:
    """[samples, tokens, vocabulary]. Its own norms compute in fp32, torch's in the dtype of their input."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    with torch.no_grad():
        return model(IDS).logits


def packed(entries: Iterable[Entry]) -> list[tuple[Any, ...]]:
    """Entries as what `torch.load` takes: boxes as three things, whole tensors as one."""
    return [
        (name, entry.tensor.clone(), entry.full_shape, entry.start) if isinstance(entry, Shard) else (name, entry.clone())
        for name, entry in entries
    ]


def unpacked(ranks: Iterable[Iterable[tuple[Any, ...]]]) -> list[Entry]:
    return [(name, Shard(tensor, *place) if place else tensor) for rank in ranks for name, tensor, *place in rank]


def loaded(case: Case, tensors: dict[str, torch.Tensor], **fields: Any) -> list[nn.Module]:
    chunks = build_chunks(case.shape, **case.sizes, **{"dtype": torch.float64, **case.fields, **fields})
    for chunk in chunks:
        for parameter in chunk.parameters():
            # What is not loaded shows.
            nn.init.constant_(parameter, torch.nan)
    load_megatron(chunks, tensors, vocab_size=case.vocab)
    return chunks


def refusal(call: Any) -> str:
    try:
        call()
    except WeightSourceError as error:
        return str(error)
    return ""


def all_cases(directory: Path) -> dict[str, Any]:
    """One spawn for all: starting processes is what takes the time."""
    found: dict[str, Any] = {}
    checkpoints = torch.load(directory / "checkpoints.pt", weights_only=True)
    for name, case in CASES.items():
        with parallel(**case.sizes):
            found[name] = there_and_back(case, checkpoints[name])
    found |= {f.__name__: f(checkpoints) for f in (views, wrapped, alone, refused)}
    return found


def there_and_back(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    chunks = loaded(case, tensors)
    return {"entries": packed(megatron_weights(chunks, vocab_size=case.vocab)), "logits": logits_of(chunks, IDS)}


def views(checkpoints: dict[str, Any]) -> dict[str, Any]:
    """Which tensors lie in the memory of a parameter, with one group a rank and with two."""
    found: dict[str, Any] = {}
    for name, groups in (("tensor parallel", 1), ("several groups a rank, tied", 2)):
        case = CASES[name]
        with parallel(**case.sizes):
            chunks = loaded(case, checkpoints[name])
            places = {parameter.untyped_storage().data_ptr() for parameter in chunks[0].parameters()}
            entries = dict(megatron_weights(chunks, gives=True))
            tensors = {name: entry.tensor if isinstance(entry, Shard) else entry for name, entry in entries.items()}
            assert not any(tensor.requires_grad for tensor in tensors.values())
            found[str(groups)] = [name for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() not in places]
    return found


def wrapped(checkpoints: dict[str, Any]) -> list[tuple[Any, ...]]:
    """In megatron's wrappers for half precision and data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    case = CASES["virtual stages"]
    with parallel(**case.sizes):
        chunks = loaded(case, checkpoints["virtual stages"], dtype=torch.float32, bf16=True)
        config = chunks[0].config
        halves = [Float16Module(config, chunk) for chunk in chunks]
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        return packed(megatron_weights([DistributedDataParallel(config, settings, half) for half in halves], vocab_size=case.vocab))


def alone(checkpoints: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the first rank gives while the others wait for it."""
    case = CASES["both, tied"]
    with parallel(**case.sizes):
        chunks = loaded(case, checkpoints["both, tied"])
        entries = packed(megatron_weights(chunks, vocab_size=case.vocab)) if dist.get_rank() == 0 else []
        dist.barrier()
        return entries


def refused(checkpoints: dict[str, Any]) -> dict[str, str]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    shape, found = Shape(layers=2, groups=1, tied=True), {}
    with parallel(tensor=2):
        chunks = build_chunks(shape, tensor=2)
        found["key heads"] = refusal(lambda: megatron_weights(chunks))
        found["another group"] = refusal(lambda: megatron_weights(chunks, tensor_rank=0, tensor_size=1))
    with parallel():
        config = config_of(shape, dtype=torch.float32, num_moe_experts=2, moe_ffn_hidden_size=8)
        model = GPTModel(config, get_gpt_layer_local_spec(num_experts=2, normalization="RMSNorm"), 32, 64)
        found["experts"] = refusal(lambda: megatron_weights(model))
        model = GPTModel(config_of(shape, dtype=torch.float32, normalization="LayerNorm"), get_gpt_layer_local_spec(), 32, 64)
        found["layer norm"] = refusal(lambda: megatron_weights(model))
        chunks = build_chunks(shape)
        found["bias"] = refusal(lambda: load_megatron(chunks, checkpoints["two stages, tied"]))
    return found


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: hugging_face(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def checkpoints(models: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by case and name, as ``save_pretrained`` has them."""
    return {
        case: {n: t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight" or not CASES[case].shape.tied}
        for case, model in models.items()
    }


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("megatron")
    torch.save(checkpoints, directory / "checkpoints.pt")
    return on_megatron_ranks(all_cases, WORLD, directory, deadline_s=300)


@pytest.mark.parametrize("case", CASES)
def test_what_was_loaded_comes_back_bit_by_bit(ranks: list[Any], checkpoints: dict[str, Any], case: str) -> None:
    assert_same(put_together(unpacked(rank[case]["entries"] for rank in ranks)), checkpoints[case])


@pytest.mark.parametrize("case", CASES)
def test_the_model_computes_what_the_checkpoint_says(ranks: list[Any], models: dict[str, Any], case: str) -> None:
    """In fp64 on both sides; rotary angles are the same fp32 numbers."""
    expected = logits_in_fp64(models[case])
    found = [rank[case]["logits"] for rank in ranks if rank[case]["logits"] is not None]
    assert len(found) == WORLD // CASES[case].pipeline
    for logits in found:
        assert_close(logits[..., : CASES[case].vocab], expected, OPERATOR_FP64, case)


@pytest.mark.parametrize("case", CASES)
def test_of_replicas_the_first_gives(ranks: list[Any], case: str) -> None:
    """Ranks are counted through tensor parallelism, then data parallelism, then the pipeline."""
    sizes = CASES[case].sizes
    copies = WORLD // sizes["tensor"] // sizes["pipeline"]
    for number, rank in enumerate(ranks):
        assert bool(rank[case]["entries"]) == (number // sizes["tensor"] % copies == 0)


def test_a_tied_embedding_comes_from_the_first_stage(ranks: list[Any]) -> None:
    names = [[name for name, *_ in rank["two stages, tied"]["entries"]] for rank in ranks]
    assert "model.embed_tokens.weight" in names[0] and "model.norm.weight" in names[2]
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(names[2])


def test_each_stage_gives_its_own_layers(ranks: list[Any]) -> None:
    layers = {
        case: [sorted({int(n.split(".")[2]) for n, *_ in ranks[r][case]["entries"] if ".layers." in n}) for r in (0, 2)]
        for case in ("uneven stages", "virtual stages")
    }
    assert layers == {"uneven stages": [[0, 1, 2], [3, 4]], "virtual stages": [[0, 2], [1, 3]]}


def test_only_heads_of_several_groups_are_copied(ranks: list[Any]) -> None:
    assert all(rank["views"]["1"] == [] for rank in ranks)
    projections = [f"model.layers.{layer}.self_attn.{which}_proj.weight" for layer in range(2) for which in "qkv"]
    assert all(rank["views"]["2"] == projections for rank in ranks)


def test_wrappers_are_looked_through(ranks: list[Any], checkpoints: dict[str, Any]) -> None:
    expected = {name: tensor.float().bfloat16() for name, tensor in checkpoints["virtual stages"].items()}
    assert_same(put_together(unpacked(rank["wrapped"] for rank in ranks)), expected)


def test_giving_needs_no_other_rank(ranks: list[Any]) -> None:
    assert [entry[0] for entry in ranks[0]["alone"]] == [entry[0] for entry in ranks[0]["both, tied"]["entries"]]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("key heads", r"1 key heads \(num_query_groups\) on 2 tensor ranks"),
        ("another group", r"embedding.word_embeddings.weight is \[16, 16\] on each of 1 tensor ranks, and 32"),
        ("experts", r"decoder.layers.0.mlp.router.weight.*experts"),
        ("layer norm", r"decoder.layers.0.input_layernorm.bias"),
        ("bias", r"has model.layers.0.self_attn.k_proj.bias.*add_qkv_bias"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(ranks: list[Any], what: str, message: str) -> None:
    for rank in ranks:
        with pytest.raises(WeightSourceError, match=message):
            raise WeightSourceError(rank["refused"][what])
