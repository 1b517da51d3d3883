"""Catches a first attention that looks at the wrong rows, that is forced on a draft which has learned, or that never comes."""

from __future__ import annotations

import torch

from tests.builders import generator, sample
from trainer_bridge.draft.dflash import DFlash, start
from trainer_bridge.draft.dflash.model import DFlashDraft
from trainer_bridge.draft.interface import FrozenTarget, TargetSpec
from trainer_bridge.draft.packing import PackedBatch, pack
from vllm_specdraft.config import EngineConfig
from vllm_specdraft.learner import Learner
from vllm_specdraft.replay import Replay

HIDDEN, VOCAB, ROWS = 128, 40, 40
SPEC = TargetSpec(
    hidden_size=HIDDEN, intermediate_size=64, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=VOCAB,
    rms_norm_eps=1e-5, rope_theta=10000.0, max_positions=256,
)  # fmt: skip
CONFIG = DFlash().configure(SPEC, tap_layers=(2, 3, 4), draft_vocab_size=20)


def draft() -> DFlashDraft:
    torch.manual_seed(3)
    model = DFlash().build(CONFIG)
    model.set_vocabulary(torch.arange(20))
    with torch.no_grad():
        model.fc.weight[:, -HIDDEN:].add_(torch.eye(HIDDEN))
        model.mask_embedding.copy_(torch.randn(HIDDEN, generator=generator(5)) + 0.5)
        model.each_layer()[0].self_attn.o_proj.weight.zero_()
    return model


def target() -> FrozenTarget:
    # States and embeddings of real models share a direction too.
    table = torch.randn(VOCAB, HIDDEN, generator=generator(6)) + 1.5
    return FrozenTarget(embedding=table, head=table)


def samples(count: int = 3) -> list:
    made = []
    for seed in range(count):
        one = sample("." + "A" * ROWS, seed=seed)
        taps = torch.randn(ROWS, 3 * HIDDEN, generator=generator(20 + seed)) + 1.5
        final = torch.randn(ROWS, HIDDEN, generator=generator(40 + seed))
        ids = torch.randint(0, VOCAB, (ROWS + 1,), generator=generator(60 + seed))
        made.append(
            type(one)(**{**vars(one), "taps": taps, "final": final, "token_ids": ids, "tap_layers": (2, 3, 4), "policy_version": 0})
        )
    return made


def batch(count: int = 3) -> PackedBatch:
    return pack(samples(count), 3)


@torch.no_grad()
def weights_of(model: DFlashDraft, batch: PackedBatch, anchor: int) -> torch.Tensor:
    """``[heads, W, rows + W]``: what the slots of the block after `anchor` look at, of the first document and their own block."""
    layer, width = model.each_layer()[0], 4
    rows, positions = anchor + 1, torch.arange(anchor + 1, anchor + 1 + width)
    first = target().embedding[batch.future_ids[anchor, :1]]
    x = layer.input_layernorm(model.slots(first, width)[0])
    trunk = model.combine(batch.taps[:rows])
    keys = torch.cat([model.keys_values(layer, trunk, torch.arange(rows))[0], model.keys_values(layer, x, positions)[0]])
    keys = keys.repeat_interleave(model.heads // model.kv_heads, 1)
    queries = model.queries(layer, x, positions)
    return (torch.einsum("qhd,khd->hqk", queries, keys) * model.head_dim**-0.5).softmax(-1)


def test_each_head_looks_at_the_row_so_far_back() -> None:
    model, many = draft(), batch(30)
    assert float(weights_of(model, many, 20).max()) < 0.5, "a random head looks everywhere"
    start.look_back(model, target(), many)
    found = weights_of(model, many, 20)
    for head in range(model.heads):
        back = 1 + head % start.OFFSETS
        for slot in (1, 2, 3):
            assert int(found[head, slot].argmax()) == 21 + slot - back, (head, slot)
    assert float(found[:, 1:].amax(-1).min()) > 0.3


def test_only_a_draft_that_attends_to_nothing_gets_it() -> None:
    model = draft()
    assert DFlash().meet(model, target(), batch()) is True
    once = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert once["layers.0.self_attn.o_proj.weight"].abs().sum() > 0
    assert DFlash().meet(model, target(), batch(2)) is False
    assert all(torch.equal(tensor, once[name]) for name, tensor in model.state_dict().items())


def learner(state: dict[str, torch.Tensor]) -> Learner:
    replay = Replay(limit_bytes=1 << 30, held_out_share=1e-9, seed=0)
    for one in samples(6):
        replay.add(one)
    config = EngineConfig(draft_dir="", state_dir="", learning_rate=1e-9, evaluate_every_steps=1000)
    return Learner(kind=DFlash(), model_config=CONFIG, state=state, target=target(), replay=replay, config=config)


def test_the_learner_shows_a_new_draft_its_first_samples_before_its_first_step() -> None:
    made = learner(draft().state_dict())
    while made.progress.steps < 2:
        made.run_piece()
    key = made.state()["layers.0.self_attn.k_proj.weight"]
    # All heads of keys begin alike: the constant part.
    first, second = key.unflatten(0, (2, 32))
    assert float(torch.cosine_similarity(first.flatten(), second.flatten(), 0)) > 0.3
    trained = draft()
    with torch.no_grad():
        trained.each_layer()[0].self_attn.o_proj.weight.fill_(0.01)
    made = learner(trained.state_dict())
    while made.progress.steps < 2:
        made.run_piece()
    assert torch.allclose(
        made.state()["layers.0.self_attn.k_proj.weight"], trained.state_dict()["layers.0.self_attn.k_proj.weight"]
    )
