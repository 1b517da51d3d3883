"""Rotary embeddings as Hugging Face configs describe them, computed as vLLM and transformers do.

A draft takes its target's rotary embedding over, scaling included: its warm start then sees the angles its weights were made
for, and vLLM derives the same longest length for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from trainer_bridge.errors import ConfigError

KNOWN = ("default", "linear", "llama3", "yarn")
"""Types of scaling whose angles do not depend on the length of a request."""
DEFAULT_THETA = 10000.0


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's ``rope_parameters`` with ``rope_type`` and ``rope_theta``, in today's layout whatever the config's is.

    Raises `ConfigError` for a rotary embedding that is none of `KNOWN`.
    """
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    found = {key: value for key, value in found.items() if value is not None}
    older_name = found.pop("type", "default")
    kind = found.setdefault("rope_type", older_name)
    found.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    nested = sorted(key for key, value in found.items() if isinstance(value, Mapping))
    share = found.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if kind not in KNOWN or nested or share != 1.0 or "mrope_section" in found:
        what = f"one per layer type ({', '.join(nested)})" if nested else f"{kind!r} with partial_rotary_factor {share:g}"
        raise ConfigError(f"rotary embedding {what} is not supported; known, for whole heads: {', '.join(KNOWN)}")
    if kind in ("llama3", "yarn"):
        found.setdefault("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    for key in _NEEDED[kind]:
        if key not in found:
            raise ConfigError(f"rotary embedding {kind!r} lacks {key!r} in the config's rope_parameters")
    if "factor" in found:
        # vLLM takes a whole number here for a list.
        found["factor"] = float(found["factor"])
    return found


_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def frequencies(parameters: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Angle per position ``[head_dim / 2]`` (fp64) and the factor on cosine and sine, for what `parameters_of` gave."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = float(parameters["rope_theta"]) ** -exponents
    kind = parameters["rope_type"]
    if kind == "linear":
        return plain / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, parameters), 1.0
    if kind == "yarn":
        return _yarn(plain, parameters, head_dim), _yarn_factor(parameters)
    return plain, 1.0


def _llama3(plain: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are stretched, short ones stay, those between are blended."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    stay = ((turns - low) / (high - low)).clamp(0, 1) if low != high else (turns > low).double()
    return stay * plain + (1 - stay) * plain / parameters["factor"]


def _yarn(plain: torch.Tensor, parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions between staying and stretching."""
    original, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return (1 - stretched) * plain + stretched * plain / parameters["factor"]


def _yarn_factor(parameters: Mapping[str, Any]) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(parameters["factor"]) + 1.0 if parameters["factor"] > 1 else 1.0

    one, all_dimensions = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(one) / scale(all_dimensions) if one and all_dimensions else scale(1.0)
