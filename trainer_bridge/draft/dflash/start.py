"""A first attention for a new DFlash draft: by position, made from the first samples instead of learned from nothing.

With one layer all queries of a block come from one mask embedding, so a head can only choose positions and kinds of rows. A random
head sees an average of the context, and the loss stays where it is until heads have found the rows that matter, which takes most
of the first minutes. Here every key gets a constant part, written into the dimensions whose rotation is fast, and every query the
same part turned back by 1, 2 or 3 positions: a head looks at the row so far before its slot, among them the last token's. Values
are the principal components of what there is to see, and the output projection puts them back in place.
"""

from __future__ import annotations

import torch

from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.draft.interface import FrozenTarget
from trainer_bridge.draft.packing import PackedBatch

OFFSETS = 3
"""Heads look 1 to so many positions back."""
_FAST = 0.19
"""Share of the rotary pairs after which the constant part has fallen to 1/e."""
_KEY_NOISE, _QUERY_NOISE, _OUTPUT = 0.015, 0.002, 0.5
_RIDGE = 1e-2
_ROWS = 240
"""Rows of either kind that are looked at: what they cost must not depend on the width of the model, or a request would wait."""


@torch.no_grad()
def look_back(model: DFlashDraft, target: FrozenTarget, batch: PackedBatch) -> None:
    """Set queries, keys, values and outputs of the first layer from the rows of `batch`."""
    layer = model.each_layer()[0]
    attention, random = layer.self_attn, torch.Generator().manual_seed(0)
    every = max(1, batch.taps.shape[0] // _ROWS)
    trunk = model.combine(batch.taps[::every])
    tokens = layer.input_layernorm(target.embedding[batch.future_ids[::every, 0]].to(trunk))
    mask = layer.input_layernorm(model.mask_embedding)
    seen = torch.cat([trunk, tokens, mask.expand(max(1, trunk.shape[0] // 20), -1)])
    constant = _constant(seen)
    fast = torch.exp(-torch.arange(model.head_dim // 2) / (_FAST * model.head_dim / 2))
    key = torch.cat([fast, torch.zeros_like(fast)])
    key *= model.head_dim**0.5 / key.norm()
    keys = torch.outer(key, constant).repeat(model.kv_heads, 1)
    queries = []
    for head in range(model.heads):
        back = torch.tensor([-(1 + head % OFFSETS)])
        queries.append(torch.outer(model.rotate(key[None, None], back)[0, 0], mask / mask.square().sum()))
    attention.k_proj.weight.copy_(keys + _KEY_NOISE * torch.randn(keys.shape, generator=random))
    attention.q_proj.weight.copy_(torch.cat(queries) + _QUERY_NOISE * torch.randn(attention.q_proj.weight.shape, generator=random))
    components = _components(seen, attention.v_proj.out_features, random)
    attention.v_proj.weight.copy_(components)
    group = model.heads // model.kv_heads
    of_heads = components.unflatten(0, (model.kv_heads, model.head_dim)).repeat_interleave(group, 0)
    attention.o_proj.weight.copy_(_OUTPUT * of_heads.flatten(0, 1).T)


def _constant(rows: torch.Tensor) -> torch.Tensor:
    """``[hidden]``: the linear function that comes closest to 1 on all `rows` ``[N, hidden]``: ridge regression's dual."""
    products = rows @ rows.T
    ridge = _RIDGE * products.diagonal().mean() * rows.shape[0] / rows.shape[1]
    return rows.T @ torch.linalg.solve(products + ridge * torch.eye(rows.shape[0], dtype=rows.dtype), rows.new_ones(rows.shape[0]))


def _components(rows: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    """``[count, hidden]``: the strongest principal components of `rows` ``[N, hidden]``; random directions beyond them."""
    centred = rows - rows.mean(0)
    strengths, weights = (part.flip(-1) for part in torch.linalg.eigh(centred @ centred.T))
    # The last ones are rounding.
    kept = min(count, rows.shape[0] // 2)
    found = weights.T[:kept] @ centred / strengths[:kept, None].sqrt()
    rest = torch.randn(count - found.shape[0], rows.shape[1], generator=random) * rows.shape[1] ** -0.5
    return torch.cat([found, rest.to(found)])
