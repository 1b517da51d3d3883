"""Catches sharded weights of which an element is sent twice, never, or from the wrong place, and a rank that waits for another.

Two processes shard small modules in every way that two can; together their boxes have to be the module, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Partial as PartialSum
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor.placement_types import _StridedShard

from tests.boxes import assert_same, put_together
from tests.distributed.processes import on_ranks
from trainer_bridge.adapters import fsdp_weights, hf_weights, module_weights
from trainer_bridge.errors import WeightSourceError
from trainer_bridge.shards import Entry, Shard

WORLD = 2
SHAPES = {
    "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "vocab_size": 23,
}  # fmt: skip


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly, or at all; a tied weight; buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.one = nn.Parameter(torch.randn(1))
        self.deep = nn.Parameter(torch.randn(3, 2, 5))
        self.register_buffer("kept", torch.arange(5))
        self.register_buffer("dropped", torch.arange(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids))) * self.one


class Even(nn.Module):
    """Columns that two ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layer = nn.Linear(4, 5)
        self.deep = nn.Parameter(torch.randn(3, 4, 6))
        self.bits16 = nn.Parameter(torch.randn(4, 2).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


# Imported where it is used: four processes that do not need it would wait a minute for it.
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    return LlamaForCausalLM(LlamaConfig(**SHAPES, tie_word_embeddings=True))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(9)
    return MixtralForCausalLM(MixtralConfig(**SHAPES, num_local_experts=3, num_experts_per_tok=2))


def packed(entries: Iterable[Entry]) -> list[tuple[Any, ...]]:
    """Entries as what `torch.load` takes: boxes as three things, whole tensors as one."""
    return [
        (name, entry.tensor.clone(), entry.full_shape, entry.start) if isinstance(entry, Shard) else (name, entry.clone())
        for name, entry in entries
    ]


def unpacked(entries: Iterable[tuple[Any, ...]]) -> list[Entry]:
    return [(name, Shard(tensor, *place) if place else tensor) for name, tensor, *place in entries]


def mesh(rows: int, columns: int) -> Any:
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("outer", "inner"))


def column_or_row(parameter: nn.Parameter) -> Rows:
    return Rows(parameter.ndim - 1) if parameter.ndim > 1 else Rows(0)


def by_rows() -> nn.Module:
    return fully_shard(Odd())


def by_columns() -> nn.Module:
    return fully_shard(Even(), shard_placement_fn=lambda p: column_or_row(p) if p.shape[-1] % 2 == 0 else Rows(0))


def replicated() -> nn.Module:
    return fully_shard(Odd(), mesh=mesh(2, 1))


def replicated_once() -> nn.Module:
    return fully_shard(Odd(), mesh=mesh(1, 2))


def after_a_forward() -> nn.Module:
    """Its parameters stay whole after a forward pass, and are plain tensors then."""
    module = fully_shard(Odd(), reshard_after_forward=False)
    module(torch.tensor([1, 2]))
    assert not isinstance(module.one, DTensor)
    return module


def over_tensor_parallel() -> nn.Module:
    """Rows cut by tensor parallelism first, then by FSDP: a strided shard."""
    module, both = Even(), mesh(1, 2)
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), both["inner"], [Rows(0)])))
    fully_shard(module, mesh=both["outer"])
    assert any(hasattr(placement, "split_factor") for placement in module.layer.weight.placements)
    return module


def with_a_part_left_out() -> nn.Module:
    """Only the inner layer is sharded; what is whole on all ranks comes from the first."""
    module = Odd()
    fully_shard(module.layer)
    return module


def language_model() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "rows": (by_rows, Odd),
    "columns": (by_columns, Even),
    "replicated": (replicated, Odd),
    "replicated once": (replicated_once, Odd),
    "after a forward": (after_a_forward, Odd),
    "over tensor parallel": (over_tensor_parallel, Even),
    "a part left out": (with_a_part_left_out, Odd),
    "a language model": (language_model, llama),
}
"""How a module is sharded, and the module before."""


def all_ways(directory: Path) -> dict[str, Any]:
    """One spawn for all: starting processes is what takes the time."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for way, (make, _) in WAYS.items():
        module = make()
        found[way] = packed(fsdp_weights(module))
        found[f"{way}, full"] = packed(fsdp_weights(module, full=True))

    module = by_rows()
    if rank == 0:  # alone: whatever needs another rank would wait for it
        found["alone"] = packed(fsdp_weights(module))
    dist.barrier()

    entries = iter(fsdp_weights(module, full=True))
    if rank == 0:
        found["first only"] = next(entries)[0]
        del entries
    else:
        assert list(entries) == []
    dist.barrier()

    found["another copy"] = packed(fsdp_weights(module, replica=1)) + packed(fsdp_weights(module, full=True, replica=1))
    found["renamed"] = [name for name, _ in fsdp_weights(module, rename={"one": "scale"}, prefix="draft.")]
    for name, call in {
        "module": lambda: module_weights(module),
        "hf": lambda: hf_weights(module),
        "experts": lambda: fsdp_weights(experts()),
        "sums": lambda: fsdp_weights(placed([PartialSum(), Replicate()], rows=5)),
        "strided": lambda: fsdp_weights(placed([_StridedShard(0, split_factor=2), Replicate()], rows=2)),
        "uneven": lambda: fsdp_weights(placed([Rows(0), Replicate()], rows=4 if rank == 0 else 1)),
    }.items():
        try:
            call()
        except WeightSourceError as error:
            found[f"{name} refused"] = str(error)
    found["experts, full"] = packed(fsdp_weights(experts(), full=True))

    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    found["trained"] = packed(fsdp_weights(module))
    found["trained, gathered"] = {
        name: tensor.full_tensor().detach().clone() for name, tensor in module.named_parameters() if isinstance(tensor, DTensor)
    }
    return found


def experts() -> nn.Module:
    return fully_shard(mixtral())


def placed(placements: list[Any], rows: int) -> nn.Module:
    """A parameter of 5 rows, `rows` of which this rank holds."""
    module = nn.Module()
    tensor = DTensor.from_local(torch.zeros(rows, 3), mesh(2, 1), placements, run_check=False, shape=(5, 3), stride=(3, 1))
    module.register_parameter("weight", nn.Parameter(tensor))
    return module


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(all_ways, WORLD, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("way", WAYS)
def test_the_boxes_of_all_ranks_are_the_module(ranks: list[dict[str, Any]], way: str) -> None:
    entries = [entry for rank in ranks for entry in unpacked(rank[way])]
    assert_same(put_together(entries), dict(hf_weights(WAYS[way][1]())))


@pytest.mark.parametrize("way", WAYS)
def test_gathered_tensors_come_from_the_first_rank_alone(ranks: list[dict[str, Any]], way: str) -> None:
    first, second = (unpacked(rank[f"{way}, full"]) for rank in ranks)
    assert second == []
    assert not any(isinstance(entry, Shard) for _, entry in first)
    assert_same(put_together(first), dict(hf_weights(WAYS[way][1]())))


def test_both_ranks_send_about_half(ranks: list[dict[str, Any]]) -> None:
    """5 rows are 3 and 2, one row is 1 and 0; a name of which a rank has no rows it does not give."""
    boxes = [{name: box for name, box in unpacked(rank["rows"]) if isinstance(box, Shard)} for rank in ranks]
    assert [(box.shape, box.start) for box in (boxes[0]["embed.weight"], boxes[1]["embed.weight"])] == [
        ((3, 3), (0, 0)),
        ((2, 3), (3, 0)),
    ]
    assert [(box.shape, box.start) for box in (boxes[0]["deep"], boxes[1]["deep"])] == [
        ((2, 2, 5), (0, 0, 0)),
        ((1, 2, 5), (2, 0, 0)),
    ]
    assert "one" in boxes[0] and "one" not in boxes[1]
    assert [[name for name, entry in unpacked(rank["rows"]) if not isinstance(entry, Shard)] for rank in ranks] == [["kept"], []]


def test_columns_are_cut_where_the_trainer_cuts_them(ranks: list[dict[str, Any]]) -> None:
    boxes = dict(unpacked(ranks[1]["columns"]))
    assert (boxes["deep"].shape, boxes["deep"].start) == ((3, 4, 3), (0, 0, 3))
    assert (boxes["layer.weight"].shape, boxes["layer.weight"].start) == ((5, 2), (0, 2))


def test_of_replicas_one_sends(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["replicated"] and not ranks[1]["replicated"]
    assert ranks[0]["another copy"] == [] and ranks[1]["another copy"] == []


def test_boxes_need_no_other_rank(ranks: list[dict[str, Any]]) -> None:
    assert_same(put_together(unpacked(ranks[0]["alone"] + ranks[1]["rows"])), dict(module_weights(Odd())))


def test_a_first_rank_that_stops_early_leaves_nobody_waiting(ranks: list[dict[str, Any]]) -> None:
    """C1: an error on one side left the other in a collective. Rank 1 came to its end, or nothing would be here."""
    assert ranks[0]["first only"] == ranks[0]["rows, full"][0][0]


def test_names_change(ranks: list[dict[str, Any]]) -> None:
    assert "draft.scale" in ranks[0]["renamed"] and all(name.startswith("draft.") for name in ranks[0]["renamed"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("module", "is a DTensor, of which this rank holds a part: use fsdp_weights"),
        ("hf", "is a DTensor, of which this rank holds a part: use fsdp_weights"),
        ("experts", "call with full=True"),
        ("sums", "weight is placed as P"),
        ("strided", "the rows of one rank are no box; call with full=True"),
        ("uneven", "of [5, 3], its placement"),
    ],
)
def test_what_is_no_box_is_refused_on_all_ranks(ranks: list[dict[str, Any]], name: str, message: str) -> None:
    assert all(message in rank[f"{name} refused"] for rank in ranks)


def test_gathered_experts_are_what_is_saved(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    assert_same(put_together(unpacked(ranks[0]["experts, full"])), load_file(tmp_path / "model.safetensors"))
    assert ranks[1]["experts, full"] == []


def test_boxes_are_what_was_trained(ranks: list[dict[str, Any]]) -> None:
    found = put_together([entry for rank in ranks for entry in unpacked(rank["trained"])])
    assert not torch.equal(found["embed.weight"], Odd().embed.weight)
    expected = {**ranks[0]["trained, gathered"], "kept": torch.arange(5)}
    assert_same(found, expected)


class Uneven(nn.Module):
    """Rows that two times two ranks share unevenly, or of which some hold none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10)
        for rows in (1, 3, 5, 7, 8, 13):
            self.register_parameter(f"rows{rows}", nn.Parameter(torch.randn(rows, 6)))
        self.flat = nn.Parameter(torch.randn(7))


def over(dim: int | None) -> nn.Module:
    """Cut over two mesh dimensions: by tensor parallelism along `dim` (replicated: None), then by FSDP along the rows."""
    module, both = Uneven(), mesh(2, 2)
    for name, parameter in list(module.named_parameters()):
        placement = Replicate() if dim is None else Rows(min(dim, parameter.ndim - 1))
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), both["inner"], [placement])))
    return fully_shard(module, mesh=both["outer"])


def in_two_dimensions(directory: Path) -> dict[str, Any]:
    modules = {"rows": over(0), "columns": over(1), "one copy": over(None), "replicas": fully_shard(Uneven(), mesh=mesh(2, 2))}
    found = {way: packed(fsdp_weights(module)) for way, module in modules.items()}
    return {**found, **{f"{way}, full": packed(fsdp_weights(module, full=True)) for way, module in modules.items()}}


def test_uneven_rows_over_two_mesh_dimensions(tmp_path: Path) -> None:
    """Four processes: what tensor parallelism cuts unevenly, FSDP cuts again."""
    found = on_ranks(in_two_dimensions, 4, tmp_path)
    for way in found[0]:
        entries = [entry for rank in found for entry in unpacked(rank[way])]
        assert_same(put_together(entries), dict(module_weights(Uneven())))
