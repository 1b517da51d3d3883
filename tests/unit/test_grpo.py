"""Catches a recipe whose batching changes the gradient (padding that counts, answers shifted against their logprobs), advantages
not of the group, and a resumed run that is another one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.grpo import Batch, Rollout, Settings, Trainer, parser, with_advantages

VOCAB = 61


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def group_of(seed: int, lengths: tuple[int, ...], rewards: tuple[float, ...]) -> list[Rollout]:
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (5 + seed,), generator=draw).tolist()
    return with_advantages(
        [
            Rollout(
                prompt_ids=prompt,
                answer_ids=torch.randint(VOCAB, (length,), generator=draw).tolist(),
                logprobs=(-4 + 0.5 * torch.randn(length, generator=draw)).tolist(),
                reward=reward,
            )
            for length, reward in zip(lengths, rewards, strict=True)
        ]
    )


GROUPS = [group_of(1, (7, 3, 1, 5), (1.0, 0.0, 0.0, 1.0)), group_of(2, (2, 2, 9, 4), (0.0, 0.0, 1.0, 0.0))]


def trainer_of(directory: Path, **options: float) -> Trainer:
    return Trainer(Settings(**options), directory)


def test_a_groups_batch_has_the_gradient_of_its_answers_one_by_one(directory: Path) -> None:
    trainer, tokens = trainer_of(directory, max_gradient_norm=math.inf, learning_rate=0.0), 33
    policy = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    loss, kl, weights = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for one in (one for group in GROUPS for one in group):
        ids = torch.tensor([one.prompt_ids + one.answer_ids])
        logprobs = policy(ids).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        logprobs = logprobs[torch.arange(len(one.answer_ids)), one.answer_ids]
        gap = (logprobs - torch.tensor(one.logprobs, dtype=torch.float64)).detach()
        weight = gap.exp().clamp(max=2.0)
        loss = loss - (weight * one.advantage * logprobs).sum() / tokens
        kl, weights = kl + float((gap.exp() - 1 - gap).sum()) / tokens, weights + float(weight.sum()) / tokens
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in policy.parameters() if p.grad is not None))
    found = trainer.step(GROUPS)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["kl"] == pytest.approx(kl, rel=1e-4) and kl > 0
    assert found["weight"] == pytest.approx(weights, rel=1e-4)


def test_advantages_are_differences_from_the_groups_mean() -> None:
    assert [one.advantage for one in GROUPS[1]] == [-0.25, -0.25, 0.75, -0.25]


def test_only_answers_are_labels() -> None:
    batch = Batch.of(GROUPS[0])
    assert batch.ids.shape == (4, 6 + 7) and batch.loss_mask.sum(1).tolist() == [7, 3, 1, 5]
    assert not batch.loss_mask[:, :6].any()
    assert torch.equal(batch.ids[batch.loss_mask], batch.answers[batch.mask])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(directory: Path, tmp_path: Path) -> None:
    through, first = trainer_of(directory, learning_rate=1e-2), trainer_of(directory, learning_rate=1e-2)
    assert first.resume(tmp_path / "state.pt") == 0
    for trainer in (through, first):
        trainer.step(GROUPS)
    first.save(tmp_path / "state.pt", 1)
    second = trainer_of(directory, learning_rate=1e-2)
    assert second.resume(tmp_path / "state.pt") == 1
    assert through.step(GROUPS) == second.step(GROUPS)


def test_the_command_line_gives_every_setting_its_type() -> None:
    found = Settings(**vars(parser().parse_args(["--learn-s", "2.5", "--cotrain", "draft", "--steps", "3", "--out", "there"])))
    assert (found.learn_s, found.cotrain, found.steps, found.out) == (2.5, Path("draft"), 3, Path("there"))
    assert Settings(**vars(parser().parse_args([]))) == Settings()
