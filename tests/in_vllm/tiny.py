"""Tiny random targets of every supported type, and what is known about them from transformers alone.

No two weights are alike and none is a plain 1 or 0, so that a bias, a norm or a head left out anywhere shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # The CPU attention of vLLM 0.32 wants heads of at least 32. Where a type allows it, heads * head_dim is not hidden.
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
}
ALL = [(kind, tied) for kind in KINDS for tied in (True, False)]
"""Every type, with tied embeddings and without."""
HIDDEN = 64
MAX_POSITIONS = 512
END = 2
"""Id of the end-of-text token."""


def name_of(kind: str, tied: bool) -> str:
    """How tests call a target."""
    return f"{kind}-{'tied' if tied else 'untied'}"


def save_target(
    directory: Path,
    kind: str,
    *,
    tied: bool,
    vocab: int = 160,
    spread: float = 1.5,
    context: float = 1.0,
    seed: int = 0,
    shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Write a random fp32 target of six layers with a tokenizer of one token per word (``t0``, ``t1``, ...).

    Args:
        spread: standard deviation of the logits.
        context: factor on what each layer adds to the hidden states. The smaller, the more the last token alone decides the
            next one, and the easier the target is to draft for.
        shard_size: largest weight file.
        config: entries of the model's config.
    """
    config_class, model_class, shape = KINDS[kind]
    settings = {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 144,
        "num_hidden_layers": 6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": END,
        "pad_token_id": 0,
        **shape,
        **config,
    }
    model = model_class(config_class(**settings)).to(torch.float32)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=random)
            if parameter.ndim == 1:
                parameter.copy_(0.3 * values + (0.0 if name.endswith("bias") else 1.0))
            elif "lm_head" in name or (tied and "embed_tokens" in name):
                parameter.copy_(values * spread * parameter.shape[1] ** -0.5)
            elif "embed_tokens" in name:
                parameter.copy_(values)
            else:
                adds = "o_proj" in name or "down_proj" in name
                parameter.copy_(values * (context if adds else 1.0) * parameter.shape[1] ** -0.5)
    model.save_pretrained(directory, max_shard_size=shard_size)
    _save_tokenizer(directory, vocab)
    return directory


def _save_tokenizer(directory: Path, vocab: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token=f"t{END}", unk_token="t0", model_max_length=MAX_POSITIONS
    )
    fast.save_pretrained(directory)


def load(target: Path) -> Any:
    """The target in transformers, fp32."""
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def prompts(count: int, *, vocab: int = 160, seed: int = 0) -> list[list[int]]:
    """Random prompts of 5 to 40 tokens, no two alike."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 41, (count,), generator=random).tolist()
    return [torch.randint(3, vocab, (length,), generator=random).tolist() for length in lengths]


@torch.no_grad()
def states(model: Any, ids: torch.Tensor, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps ``[n, K * hidden]`` and final states ``[n, hidden]`` of a Hugging Face forward over ``ids`` ``[n]``."""
    out = model.model(ids[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in layers], -1), out.last_hidden_state[0]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens after a prompt, end of text or not."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def greedy_gaps(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """How far each answer token's logit lies below the best one, as a share of the largest logit: all 0 for greedy decoding.

    Where all are 0 the answer is what Hugging Face's ``generate`` gives, token for token: each is the best one after the same
    tokens. ``[len(answer)]``.
    """
    ids = torch.tensor([*prompt, *answer])
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return (logits.amax(-1) - chosen) / logits.abs().amax(-1)
