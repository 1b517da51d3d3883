"""GRPO against a rollout server, in plain PyTorch: ``python -m recipes.grpo --url http://127.0.0.1:8000``.

Each step: sample groups of answers over the OpenAI API, with logprobs; reward them; one policy gradient step on the difference of
each reward from its group's mean (DeepSeekMath, arXiv 2402.03300, section 4.1; without the division by the standard deviation,
arXiv 2503.20783), with truncated importance weights between engine and trainer; bring the new weights to the server.

The server may be `specdraft serve` (weights go over the bridge, and with ``--cotrain DRAFT`` the draft learns in the same forward
pass) or a stock vLLM in development mode (``--update reload``: it reads a checkpoint from the disk).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import requests
import torch
from openai import AsyncOpenAI
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipes.tasks import Problem, problems
from trainer_bridge import connect
from trainer_bridge.adapters.hf import hf_weights
from trainer_bridge.adapters.module import module_weights
from trainer_bridge.adapters.views.hf import hf_policy
from trainer_bridge.cotrain.microbatch import Microbatch
from trainer_bridge.cotrain.run import CoTraining
from trainer_bridge.cotrain.trainer import DraftCoTrainer
from trainer_bridge.draft import checkpoint, registry
from trainer_bridge.taps.schedules import one_f_one_b


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run."""

    url: str = "http://127.0.0.1:8000"
    model: Path | None = None
    """Hugging Face directory of the policy; None: what the server serves."""
    out: Path = Path("runs/grpo")
    """metrics.jsonl, TensorBoard files and the state to resume from."""
    task: str = "basic_arithmetic"
    steps: int = 4
    groups: int = 4
    """Problems per step."""
    samples: int = 4
    """Answers per problem."""
    concurrency: int = 4
    """Answers under way at once."""
    max_tokens: int = 64
    temperature: float = 1.0
    """Another one needs a server with ``--logprobs-mode processed_logprobs``: the policy gradient is of what was sampled from."""
    learning_rate: float = 2e-6
    truncate: float = 2.0
    """Largest importance weight."""
    max_gradient_norm: float = 1.0
    seed: int = 0
    update: str = "bridge"
    """bridge, or reload for a stock server."""
    cotrain: Path | None = None
    """Draft that learns in the policy's forward pass and goes along with each update."""
    learn_s: float | None = None
    """The server's draft learns for so long between the answers and the training step, for a trainer on the same device; None:
    whenever no requests are there, for a trainer that has its own device."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One answer."""

    prompt_ids: list[int]
    answer_ids: list[int]
    logprobs: list[float]
    """Of the answer's tokens, by the engine."""
    reward: float
    advantage: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A group's answers as rows, padded at their ends, where causal attention lets nothing look."""

    ids: torch.Tensor
    """``[answers, prompt + longest]``"""
    answers: torch.Tensor
    """``[answers, longest]``, as all below."""
    mask: torch.Tensor
    """False: padding."""
    sampled: torch.Tensor
    """Logprobs by the engine."""
    advantages: torch.Tensor
    """``[answers]``"""

    @classmethod
    def of(cls, group: Sequence[Rollout]) -> Batch:
        """Answers to the same prompt."""
        answers = pad_sequence([torch.tensor(one.answer_ids) for one in group], batch_first=True)
        prompt = torch.tensor(group[0].prompt_ids).expand(len(group), -1)
        lengths = torch.tensor([len(one.answer_ids) for one in group])
        return cls(
            ids=torch.cat([prompt, answers], 1),
            answers=answers,
            mask=torch.arange(answers.shape[1]) < lengths[:, None],
            sampled=pad_sequence([torch.tensor(one.logprobs) for one in group], batch_first=True),
            advantages=torch.tensor([one.advantage for one in group]),
        )

    @property
    def loss_mask(self) -> torch.Tensor:
        """``[answers, prompt + longest]``"""
        return torch.nn.functional.pad(self.mask, (self.ids.shape[1] - self.mask.shape[1], 0))


class Server:
    """What serves the policy."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = AsyncOpenAI(base_url=f"{settings.url}/v1", api_key="none", timeout=600, max_retries=0)
        self.model = requests.get(f"{settings.url}/v1/models", timeout=30).json()["data"][0]

    async def roll_out(self, asked: Sequence[Problem], step: int) -> list[list[Rollout]]:
        """A group of answers to each problem."""
        free = asyncio.Semaphore(self._settings.concurrency)

        async def one(problem: Problem, index: int, sample: int) -> Rollout:
            async with free:
                found = await self._client.chat.completions.create(
                    model=self.model["id"],
                    messages=[{"role": "user", "content": problem.question}],
                    temperature=self._settings.temperature,
                    top_p=1.0,
                    max_tokens=self._settings.max_tokens,
                    # The same for every server that is compared.
                    seed=((self._settings.seed * 1000 + step) * 1000 + index) * 1000 + sample,
                    logprobs=True,
                    extra_body={"return_token_ids": True, "top_k": 0},
                )
            choice = found.choices[0]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            extra: dict[str, Any] = {**(found.model_extra or {}), **(choice.model_extra or {})}
            return Rollout(
                prompt_ids=extra["prompt_token_ids"],
                answer_ids=extra["token_ids"],
                logprobs=[token.logprob for token in choice.logprobs.content],
                reward=problem.reward(choice.message.content or ""),
            )

        work = [one(problem, index, sample) for index, problem in enumerate(asked) for sample in range(self._settings.samples)]
        answers = await asyncio.gather(*work)
        size = self._settings.samples
        return [answers[start : start + size] for start in range(0, len(answers), size)]

    def counters(self) -> dict[str, float]:
        """Draft steps and accepted tokens so far, by vLLM's own metrics; zeros where it does not speculate."""
        lines = requests.get(f"{self._settings.url}/metrics", timeout=30).text.splitlines()

        def total(name: str) -> float:
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total"))

        return {"drafts": total("num_drafts"), "accepted": total("num_accepted_tokens")}

    def learn(self, enabled: bool) -> None:
        """Let the draft learn while no requests are there, or not."""
        self._post("specdraft/train", {"action": "resume" if enabled else "pause"}, timeout_s=60)

    def reload(self, directory: Path) -> None:
        """Have a stock server in development mode read a checkpoint from the disk."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory.resolve())}}
        self._post("collective_rpc", call, timeout_s=300)
        self._post("reset_prefix_cache", {}, timeout_s=30)

    def _post(self, route: str, body: dict[str, Any], *, timeout_s: float) -> None:
        requests.post(f"{self._settings.url}/{route}", json=body, timeout=timeout_s).raise_for_status()


class Trainer:
    """The policy, its optimizer, and the draft that may learn beside it."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        torch.manual_seed(settings.seed)
        self._settings = settings
        self.policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.draft: DraftCoTrainer | None = None
        if settings.cotrain is not None:
            kind = registry.of_config(checkpoint.read_config(settings.cotrain))
            model, config = kind.load(settings.cotrain)
            self.draft = DraftCoTrainer(kind, model)
            self._cotraining = CoTraining(
                hf_policy(self.policy), tap_layers=kind.tap_layers(config), schedule=one_f_one_b(1, settings.groups),
                draft=self.draft, max_rows=8192,
            )  # fmt: skip

    def step(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """One update; what it saw. A group is one microbatch."""
        tokens = sum(len(one.answer_ids) for group in groups for one in group)
        found = {"loss": 0.0, "kl": 0.0, "weight": 0.0}
        batches = [Batch.of(group) for group in groups]
        with self._around(batches):
            for batch in batches:
                logits = self.policy(input_ids=batch.ids, logits_to_keep=batch.answers.shape[1] + 1).logits[:, :-1]
                logprobs = (logits / self._settings.temperature).log_softmax(-1).gather(-1, batch.answers[..., None]).squeeze(-1)
                gap = torch.where(batch.mask, logprobs - batch.sampled, 0.0)
                # The policy that sampled is the engine's: other kernels, the same weights.
                weight = gap.detach().exp().clamp(max=self._settings.truncate)
                loss = -(weight * batch.advantages[:, None] * logprobs)[batch.mask].sum() / tokens
                loss.backward()
                found["loss"] += float(loss.detach())
                found["weight"] += float(weight[batch.mask].sum()) / tokens
                # k3 of http://joschu.net/blog/kl-approx.html: not negative, and of small variance.
                found["kl"] += float((gap.detach().exp() - 1 - gap.detach()).sum()) / tokens
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._settings.max_gradient_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        found["gradient_norm"] = float(norm)
        if self.draft is not None and self._cotraining.result is not None:
            found["draft_loss"] = float(self._cotraining.result.loss)
        return found

    def _around(self, batches: Sequence[Batch]) -> contextlib.AbstractContextManager[None]:
        if self.draft is None:
            return contextlib.nullcontext()
        return self._cotraining.step([Microbatch.of_rows(batch.ids, batch.loss_mask) for batch in batches])

    def save(self, path: Path, step: int) -> None:
        """Everything that the next step needs, whole or not at all."""
        state = {"step": step, "policy": self.policy.state_dict(), "optimizer": self._optimizer.state_dict()}
        if self.draft is not None:
            state["draft"] = self.draft.state_dict()
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def resume(self, path: Path) -> int:
        """Steps that were done."""
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True, mmap=True)
        self.policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self.draft is not None:
            self.draft.load_state_dict(state["draft"])
        return int(state["step"])


def with_advantages(group: Sequence[Rollout]) -> list[Rollout]:
    """Each rollout with its reward's difference from the group's mean."""
    mean = sum(one.reward for one in group) / len(group)
    return [replace(one, advantage=one.reward - mean) for one in group]


def run(settings: Settings) -> None:
    """All steps that are not done yet; one line of metrics for each."""
    settings.out.mkdir(parents=True, exist_ok=True)
    server = Server(settings)
    directory = settings.model or Path(server.model["root"])
    trainer = Trainer(settings, directory)
    done = trainer.resume(settings.out / "state.pt")
    stream = problems(settings.task, settings.seed)
    asked = [[next(stream) for _ in range(settings.groups)] for _ in range(settings.steps)]
    board = _board(settings.out)
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner())
        bridge = stack.enter_context(connect(settings.url)) if settings.update == "bridge" else None

        def publish() -> dict[str, float]:
            began = time.perf_counter()
            if bridge is None:
                trainer.policy.save_pretrained(settings.out / "policy")
                server.reload(settings.out / "policy")
            else:
                with bridge.update(version=bridge.policy_version + 1) as update:
                    update.target(hf_weights(trainer.policy))
                    if trainer.draft is not None:
                        update.draft(module_weights(trainer.draft.model))
            return {"sync_s": time.perf_counter() - began}

        if settings.learn_s is not None:
            server.learn(False)
        if done:
            publish()
        for step in range(done, settings.steps):
            began, before = time.perf_counter(), server.counters()
            groups = loop.run(server.roll_out(asked[step], step))
            rolled_s, after = time.perf_counter() - began, server.counters()
            if settings.learn_s is not None:
                server.learn(True)
                time.sleep(settings.learn_s)
                server.learn(False)
            learned_s = time.perf_counter() - began - rolled_s
            rollouts = [one for group in groups for one in group]
            trained = trainer.step([with_advantages(group) for group in groups])
            train_s = time.perf_counter() - began - rolled_s - learned_s
            synced = publish()
            drafts, accepted = after["drafts"] - before["drafts"], after["accepted"] - before["accepted"]
            metrics = {
                "step": step,
                "rollout_s": rolled_s,
                "learn_s": learned_s,
                "train_s": train_s,
                **synced,
                "step_s": time.perf_counter() - began,
                "reward": sum(one.reward for one in rollouts) / len(rollouts),
                "tokens": sum(len(one.answer_ids) for one in rollouts),
                "accepted_length": 1 + accepted / drafts if drafts else None,
                **trained,
            }
            trainer.save(settings.out / "state.pt", step + 1)
            with (settings.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")
            for name, value in metrics.items():
                if board is not None and value is not None:
                    board.add_scalar(name, value, step)
            print(_line(metrics), flush=True)


def _board(out: Path) -> Any | None:
    """A TensorBoard writer, where it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(out))


def _line(found: dict[str, Any]) -> str:
    length = found["accepted_length"]
    return (
        f"step {found['step']}: reward {found['reward']:.2f}, accepted {'-' if length is None else f'{length:.2f}'}, rollout "
        f"{found['rollout_s']:.1f} s, train {found['train_s']:.1f} s, sync {found['sync_s']:.1f} s, KL {found['kl']:.1e}"
    )


def parser() -> argparse.ArgumentParser:
    """One option for each setting."""
    made = argparse.ArgumentParser(prog="python -m recipes.grpo", description=(__doc__ or "").split("\n\n")[0])
    for field in fields(Settings):
        kind = {"int": int, "float": float, "str": str}.get(str(field.type).removesuffix(" | None"), Path)
        choices = ("bridge", "reload") if field.name == "update" else None
        made.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, choices=choices, help="(default %(default)s)"
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit code."""
    settings = Settings(**vars(parser().parse_args(argv)))
    print(json.dumps({key: str(value) for key, value in asdict(settings).items()}), file=sys.stderr)
    run(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
