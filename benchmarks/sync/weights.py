"""Weights for the benchmarks of weight sync: a checkpoint's, the same a little changed, and made-up ones of any size."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trainer_bridge.carriers.sending import bytes_of
from trainer_bridge.digest import digest
from vllm_specdraft.demo.prompts import Prompt
from vllm_specdraft.sync_process import plan_of

Weights: TypeAlias = dict[str, torch.Tensor]

NOISE = 0.05
"""How much `perturbed` changes a weight, as a share of it: other answers, and still a model."""
_BF16_STEP = 1 << 16
"""Of an fp32 number's bits: the last one that bfloat16 keeps."""


def read(target: Path, draft: Path) -> Weights:
    """Tensors of a checkpoint that an engine of this target and draft takes, by name, in memory of their own."""
    wanted = {spec.name for spec in plan_of(target, draft).target}
    found: Weights = {}
    for file in sorted(target.glob("*.safetensors")):
        found |= {name: tensor.clone() for name, tensor in load_file(file).items() if name in wanted}
    return found


def read_draft(draft: Path) -> Weights:
    """Tensors of a draft checkpoint by name."""
    return load_file(draft / "model.safetensors")


def perturbed(weights: Mapping[str, torch.Tensor], *, seed: int = 1) -> Weights:
    """The same tensors with every floating-point number changed by about `NOISE`; the same ones for the same seed."""
    random = torch.Generator().manual_seed(seed)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        return (tensor * (1 + NOISE * torch.randn(tensor.shape, generator=random))).to(tensor.dtype)

    return {name: changed(weights[name]) for name in sorted(weights)}


def save_like(directory: Path, weights: Weights, out: Path) -> Path:
    """Write a checkpoint with these weights, and everything else (config, tokenizer) as in `directory`."""
    out.mkdir(parents=True)
    for file in directory.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def synthetic(nbytes: int, *, seed: int = 0) -> Weights:
    """Random fp32 tensors shaped like a model's, about `nbytes` in all: from single numbers to an embedding of a fifth of it."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in _shapes(nbytes // 4)}


def _shapes(elements: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A fifth of all for the embedding, the rest for layers of about 1/20 each."""
    width = 1 << max(4, round(math.log2(math.sqrt(elements / 120))))
    yield "embedding", (max(1, elements // 5 // width), width)
    layer = {
        "norm": (width,), "scale": (), "bias": (3,), "query": (width, width), "key": (width // 4, width), "mlp": (4 * width, width),
    }  # fmt: skip
    per_layer = sum(math.prod(shape) for shape in layer.values())
    for index in range(max(1, elements * 4 // 5 // per_layer)):
        for name, shape in layer.items():
            yield f"layers.{index}.{name}", shape


def write_shell(directory: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """A target directory that holds all that a receiver reads of one: a config, and a weight file whose data is a hole."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    header, at = {}, 0
    for name, tensor in weights.items():
        end = at + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return directory


def change(weights: Weights, share: float, random: np.random.Generator) -> float:
    """Change a random share of all elements in place, each by one step of bfloat16; the share that really was changed.

    Args:
        weights: fp32. A step in bfloat16 stays one when fp32 is rounded to it, ties included.
    """
    changed = total = 0
    for tensor in weights.values():
        words = tensor.view(-1).view(torch.int32).numpy()
        chosen = np.flatnonzero(random.random(words.size, dtype=np.float32) < share)
        words[chosen] ^= _BF16_STEP
        changed, total = changed + chosen.size, total + words.size
    return changed / total


def digests(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest of every tensor's bytes."""
    return {name: digest(bytes_of(tensor.contiguous())).hex() for name, tensor in weights.items()}


def nbytes_of(weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def prompt_ids(target: Path, prompts: tuple[Prompt, ...]) -> list[list[int]]:
    """The prompts as tokens of a target; as many random tokens where it has no chat template, and so understands no question."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt.question}] for prompt in prompts]
        made = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats]
        return [list(chat["input_ids"]) for chat in made]
    random = np.random.default_rng(0)
    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    return [random.integers(3, vocabulary, 12 + 3 * index).tolist() for index in range(len(prompts))]
