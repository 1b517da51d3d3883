"""Drafts from the request's own text: what followed the last time its latest tokens stood there (prompt lookup).

The matching is vLLM's. Its own ``ngram`` method cannot be had beside a draft model: one engine has one method.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SHORTEST, LONGEST = 2, 5
"""Tokens that must match, and that are looked at."""
NOTHING = -1
"""Stands where there is no draft token."""


def propose(runner: Any, inputs: dict[str, Any], tokens: int) -> torch.Tensor:
    """``[requests, tokens]`` draft tokens for the step that ``drafter.propose(**inputs)`` is called for."""
    bounds = inputs["common_attn_metadata"].query_start_loc_cpu.tolist()
    refused = inputs.get("num_rejected_tokens_gpu")
    unused = refused.tolist() if refused is not None else [0] * (len(bounds) - 1)
    positions, following = inputs["target_positions"].tolist(), inputs["next_token_ids"].tolist()
    found = torch.full((len(bounds) - 1, tokens), NOTHING, dtype=torch.int64)
    for index, (end, drop) in enumerate(zip(bounds[1:], unused, strict=False)):
        last = positions[end - 1 - drop]
        text = np.append(runner.input_batch.token_ids_cpu[index, : last + 1], following[index]).astype(np.int32)
        match = _matched(text, runner.max_model_len, tokens)
        found[index, : len(match)] = torch.from_numpy(match.astype(np.int64))
    return found


def warm_up() -> None:
    """Compile before a request waits for it."""
    _matched(np.arange(8, dtype=np.int32), 64, 2)


def _matched(text: np.ndarray, longest_text: int, tokens: int) -> np.ndarray:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as matched

    return matched(text, SHORTEST, LONGEST, longest_text, tokens)
