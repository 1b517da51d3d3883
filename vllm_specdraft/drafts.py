"""Making and describing draft checkpoints (``specdraft draft init``, ``specdraft draft info``)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_bridge.errors import CheckpointError, ConfigError
from vllm_specdraft import target as targets
from vllm_specdraft.embedded import cache_dir

if TYPE_CHECKING:
    import torch

    from trainer_bridge.draft.interface import FrozenTarget
    from trainer_bridge.taps import TapSample

logger = logging.getLogger(__name__)

DEFAULT_TYPE = "eagle3"
"""Draft type of ``--draft auto``, of ``specdraft draft init`` and of the demo: the README says why."""
DEFAULT_DRAFT_VOCAB = 4096
"""Small, because a small head learns and drafts faster, and the learner adapts the vocabulary to the traffic."""
PROMPTS = (
    "What is the capital of France?",
    "Tom has 3 boxes with 12 pencils each and gives 9 pencils away. How many are left?",
    "Write two sentences about the sea.",
    "Explain why the sky is blue.",
    "Name three animals that live in a forest.",
    "A shirt costs 20 dollars and is sold for a quarter less. What does it cost now?",
    "What is a prime number?",
    "Anna is 12 years old and her brother is 5 years younger. How old is he?",
)
"""What the target is asked when the gain of the warm start is measured; the last two answers are held out."""
HELD_OUT = 2
SUPPORTED = ("llama", "qwen2", "qwen3")
"""``model_type`` of targets whose layers, norms and embeddings are what a draft takes them for."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class WarmStartGain:
    """A warm and a random start on the same self-generated answers, both after the same few optimizer steps."""

    steps: int
    tokens: int
    """Answer tokens that the target generated for it."""
    random_loss: float
    """On held-out answers; soft cross-entropy, nats per label, passes weighted as in training and summed."""
    warm_loss: float
    random_accepted_length: float
    warm_accepted_length: float


class TargetWeights(Mapping[str, "torch.Tensor"]):
    """Tensors of a target directory by name, one file or many; each is read when asked for: a draft needs few of them."""

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigError` when there are no weights, or a file is missing or damaged."""
        self._files = self._from_index(directory) if (directory / INDEX).exists() else self._from_files(directory)

    def _from_index(self, directory: Path) -> dict[str, Path]:
        try:
            names: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{directory / INDEX} is damaged: {error}") from None
        if missing := sorted(file for file in set(names.values()) if not (directory / file).exists()):
            raise ConfigError(f"{directory} lacks {', '.join(missing)}, which its {INDEX} names: copy all files of the model")
        return {name: directory / file for name, file in names.items()}

    def _from_files(self, directory: Path) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        found: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    found |= dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise ConfigError(f"{path} is damaged or half-written: {error}") from None
        if not found:
            raise ConfigError(f"{directory} has no *.safetensors weights")
        return found

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_target(target: Path) -> tuple[dict[str, Any], TargetWeights]:
    """Config and weights of a target directory. Raises `ConfigError` for a model that no draft can be made for."""
    config = targets.read_config(Path(target))
    if (kind := config.get("model_type")) not in SUPPORTED:
        raise ConfigError(f"{target} is a model of type {kind!r}; drafts can be made for {', '.join(SUPPORTED)}")
    if config.get("quantization_config"):
        raise ConfigError(f"{target} holds quantised weights, a draft starts from plain ones; give the model it was made from")
    return config, TargetWeights(Path(target))


def frozen_of(target: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> FrozenTarget:
    """Embedding and head as the engine uses them. Raises `ConfigError` when one is missing."""
    import torch

    from trainer_bridge.draft.interface import FrozenTarget

    embedding, head = weights.get("model.embed_tokens.weight"), weights.get("lm_head.weight")
    if embedding is None:
        raise ConfigError(f"{target} is not Llama-like: it has no model.embed_tokens.weight")
    if config.get("tie_word_embeddings", head is None):
        if head is not None and not torch.equal(head, embedding):
            logger.warning("%s ties its embeddings but holds an lm_head.weight of its own: it is ignored, as engines do", target)
        return FrozenTarget(embedding=embedding, head=embedding)
    if head is None:
        raise ConfigError(f"{target} does not tie its embeddings and has no lm_head.weight")
    return FrozenTarget(embedding=embedding, head=head)


def init(
    target: Path,
    out: Path,
    *,
    kind: str = DEFAULT_TYPE,
    draft_vocab_size: int = DEFAULT_DRAFT_VOCAB,
    tap_layers: Sequence[int] | None = None,
    texts: Iterable[str] = (),
    seed: int = 0,
    warm: bool = True,
) -> Path:
    """Write a new draft checkpoint for `target` into `out`.

    Args:
        texts: text whose tokens are counted for the draft vocabulary; without any, low ids are taken (byte-pair
            vocabularies number frequent merges first), and the learner adapts the vocabulary to the traffic later.
        warm: start from the target's own weights; False: random weights (for comparison).
    """
    import torch

    from trainer_bridge.draft import registry, vocab
    from trainer_bridge.draft.interface import TargetSpec

    config, weights = read_target(target)
    spec = TargetSpec.from_config(config)
    draft_type = registry.by_name(kind)
    taps = tuple(tap_layers) if tap_layers is not None else draft_type.default_tap_layers(spec)
    size = min(draft_vocab_size, spec.vocab_size - 1)
    draft_config = draft_type.configure(spec, tap_layers=taps, draft_vocab_size=size)
    torch.manual_seed(seed)
    model = draft_type.build(draft_config)
    end = config.get("eos_token_id")
    always = [t for t in (end if isinstance(end, list) else [end]) if t is not None]
    draft_type.set_vocabulary(model, vocab.choose(_count(target, texts, spec.vocab_size), size, always))
    if warm:
        try:
            draft_type.warm_start(model, frozen_of(target, config, weights), weights)
        except KeyError as error:
            raise ConfigError(f"{target} is not Llama-like: it has no {error.args[0]}") from None
    draft_type.save(out, model.state_dict(), draft_config)
    return out


def _count(target: Path, texts: Iterable[str], vocab_size: int) -> torch.Tensor:
    import torch

    counts = torch.zeros(vocab_size, dtype=torch.int64)
    tokenizer = None
    for text in texts:
        if tokenizer is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(target)
        counts += torch.bincount(torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64), minlength=vocab_size)
    return counts


def auto(target: Path, *, kind: str = DEFAULT_TYPE) -> Path:
    """The cached first draft of a target; made on first use."""
    targets.read_config(Path(target))
    config = (Path(target) / "config.json").read_bytes()
    name = hashlib.blake2b(config + str(Path(target).resolve()).encode(), digest_size=6).hexdigest()
    out = cache_dir() / "drafts" / f"{Path(target).name}-{kind}-{name}"
    try:
        info(out)
    except CheckpointError:
        logger.info("making a first draft for %s", target)
        init(target, out, kind=kind)
    return out


def info(directory: Path) -> dict[str, Any]:
    """What a draft checkpoint is. Raises `CheckpointError` when it is none, or damaged."""
    from trainer_bridge.draft import checkpoint, registry

    config = checkpoint.read_config(directory)
    draft_type = registry.of_config(config)
    model, _ = draft_type.load(directory)
    return {
        "directory": str(directory),
        "type": draft_type.name,
        "engine_method": draft_type.engine_method,
        "architecture": config["architectures"][0],
        "tap_layers": list(draft_type.tap_layers(config)),
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": config["draft_vocab_size"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "digest": checkpoint.digest_of(model.state_dict()),
    }


def warm_start_gain(target: Path, draft: Path, *, answer_tokens: int = 48, steps: int = 24) -> WarmStartGain:
    """What a draft's start is worth against a random one of the same shape, on answers that the target generates now.

    Compared after `steps` optimizer steps: a start is worth what it saves the learner.
    """
    import torch

    from trainer_bridge.draft import checkpoint, registry
    from trainer_bridge.draft.packing import pack

    config, weights = read_target(target)
    frozen = frozen_of(target, config, weights)
    draft_config = checkpoint.read_config(draft)
    draft_type = registry.of_config(draft_config)
    passes = draft_type.default_tokens
    samples = self_generated(target, draft_type.tap_layers(draft_config), PROMPTS, answer_tokens=answer_tokens)
    model, _ = draft_type.load(draft)
    torch.manual_seed(0)
    plain = draft_type.build(draft_config)
    for name, buffer in model.named_buffers():
        # The same draft vocabulary: what is compared is the weights.
        plain.get_buffer(name).copy_(buffer)
    measured = []
    draft_type.meet(model, frozen, pack(samples[:-HELD_OUT], passes))
    for candidate in (plain, model):
        objective = draft_type.objective(candidate, frozen, passes=passes)
        _learn(candidate, objective, samples[:-HELD_OUT], passes, steps)
        measured.append(_loss_and_length(objective, samples[-HELD_OUT:], passes))
    (random_loss, random_length), (warm_loss, warm_length) = measured
    return WarmStartGain(
        steps=steps,
        tokens=sum(s.num_answer_tokens for s in samples),
        random_loss=random_loss,
        warm_loss=warm_loss,
        random_accepted_length=random_length,
        warm_accepted_length=warm_length,
    )


def _learn(model: Any, objective: Any, samples: list, passes: int, steps: int) -> None:
    import torch

    from trainer_bridge.draft.packing import pack

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        batch = pack([samples[step % len(samples)]], passes)
        optimizer.zero_grad()
        for _ in objective.pieces(batch, objective.label_counts(batch)):
            pass
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    objective.take_loss()


def _loss_and_length(objective: Any, samples: list, passes: int) -> tuple[float, float]:
    from trainer_bridge.draft.packing import pack

    batch = pack(samples, passes)
    for _ in objective.pieces(batch, objective.label_counts(batch)):
        pass
    return objective.take_loss(), objective.measure(batch).length


def self_generated(target: Path, tap_layers: Sequence[int], prompts: Iterable[str], *, answer_tokens: int) -> list[TapSample]:
    """Samples of what the target answers to `prompts`, greedy, at most `answer_tokens` each; taps by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer_bridge.taps import TapSample

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    samples = []
    for index, prompt in enumerate(prompts):
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        else:
            text = prompt
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)["input_ids"]
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer_tokens, do_sample=False)
            out = model.model(whole[:, :-1], output_hidden_states=True)
        mask = torch.zeros(whole.shape[1], dtype=torch.bool)
        mask[ids.shape[1] :] = True
        sample = TapSample(
            request_id=f"self-{index}",
            group_id=f"self-{index}",
            policy_version=0,
            token_ids=whole[0],
            positions=torch.arange(whole.shape[1]),
            loss_mask=mask,
            tap_layers=tuple(tap_layers),
            taps=torch.cat([out.hidden_states[layer][0] for layer in tap_layers], -1),
            final=out.last_hidden_state[0],
            final_is_normed=True,
        )
        samples.append(sample.validate())
    return samples
