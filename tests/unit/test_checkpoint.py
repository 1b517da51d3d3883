"""Catches a checkpoint that is half there, damaged, or another model's, and is loaded all the same; and a save that can
lose the last good one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.builders import KEPT, dflash_config, dflash_draft, draft, draft_config
from trainer_bridge.draft import checkpoint, registry
from trainer_bridge.draft.dflash import DFlash
from trainer_bridge.draft.eagle3 import Eagle3
from trainer_bridge.errors import CheckpointError

State = dict[str, torch.Tensor]


def state_of(seed: int = 0) -> State:
    return {name: tensor.clone() for name, tensor in draft(seed=seed, dtype=torch.float32).state_dict().items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A good checkpoint of the draft with seed 0."""
    checkpoint.save(tmp_path / "draft", state_of(), draft_config())
    return tmp_path / "draft"


def test_what_was_saved_is_loaded(saved: Path) -> None:
    model, config = Eagle3().load(saved)
    assert config == draft_config()
    loaded = model.state_dict()
    assert loaded.keys() == state_of().keys()
    for name, tensor in state_of().items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype
    assert model.kept().tolist() == list(KEPT)
    assert registry.of_config(config).name == "eagle3"


def test_the_files_are_what_stock_loaders_look_for(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight"} <= state_of().keys()
    assert saved.stat().st_mode & 0o777 == 0o755


def test_a_new_save_replaces_the_old_one_and_leaves_nothing_behind(saved: Path) -> None:
    checkpoint.save(saved, state_of(seed=1), draft_config())
    assert checkpoint.digest_of(checkpoint.read_state(saved)) == checkpoint.digest_of(state_of(seed=1))
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_parameters_that_are_views_or_need_gradients_can_be_saved(tmp_path: Path) -> None:
    state = dict(draft(dtype=torch.float32).named_parameters()) | {"d2t": state_of()["d2t"], "t2d": state_of()["t2d"]}
    state["fc.weight"] = state["fc.weight"].T.contiguous().T
    checkpoint.save(tmp_path / "deeper" / "draft", state, draft_config())
    assert checkpoint.digest_of(checkpoint.read_state(tmp_path / "deeper" / "draft")) == checkpoint.digest_of(state_of())


# What must not be loaded.


def rewrite(directory: Path, change: Callable[[State], object]) -> None:
    state = state_of()
    change(state)
    save_file(state, directory / checkpoint.WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("norm.weight"), r"missing tensors \['norm\.weight'\], unknown tensors none"),
        (lambda state: state.update(extra=torch.ones(2)), r"missing tensors none, unknown tensors \['extra'\]"),
        (lambda state: state.update({"fc.weight": torch.ones(8, 23)}), r"fc\.weight has shape \(8, 23\).*\(8, 24\)"),
        (lambda state: state.update({"norm.weight": state["norm.weight"][None]}), r"norm\.weight has shape \(1, 8\)"),
    ],
    ids=["missing", "unknown", "wrong shape", "one dimension too many"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(saved: Path, change: Callable[[State], object], message: str) -> None:
    """A9: a parameter that a load would not write, or a tensor that nobody takes, raises with its name."""
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Eagle3().load(saved)
    assert str(saved) in str(caught.value)


def test_a_refused_checkpoint_leaves_the_model_as_it_was(saved: Path) -> None:
    """B9: nothing is half-loaded."""
    rewrite(saved, lambda state: state.update({"norm.weight": torch.ones(9), "fc.weight": torch.zeros(8, 24)}))
    model = draft(seed=2, dtype=torch.float32)
    before = checkpoint.digest_of(model.state_dict())
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        checkpoint.read_into(model, saved)
    assert checkpoint.digest_of(model.state_dict()) == before


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 0.999])
def test_a_weights_file_cut_short_is_refused(saved: Path, share: float) -> None:
    weights = saved / checkpoint.WEIGHTS
    weights.write_bytes(weights.read_bytes()[: int(share * weights.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or half-written"):
        Eagle3().load(saved)


def test_a_missing_weights_file_is_refused(saved: Path) -> None:
    (saved / checkpoint.WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        Eagle3().load(saved)


def test_a_folder_that_is_no_checkpoint_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="specdraft draft init"):
        Eagle3().load(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", '{"hidden_size": 8', "[1, 2]", '"eagle3"'])
def test_a_config_that_is_no_json_object_is_refused(saved: Path, text: str) -> None:
    (saved / checkpoint.CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Eagle3().load(saved)


@pytest.mark.parametrize("key", ["hidden_size", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"])
def test_a_config_without_a_needed_entry_is_refused_by_its_name(saved: Path, key: str) -> None:
    config = draft_config()
    del config[key]
    (saved / checkpoint.CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        Eagle3().load(saved)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None])
def test_a_foreign_architecture_is_refused_by_its_name(saved: Path, architectures: list[str] | None) -> None:
    (saved / checkpoint.CONFIG).write_text(json.dumps(draft_config(architectures=architectures)))
    with pytest.raises(CheckpointError, match=r"architecture.*(LlamaForCausalLM|\[\]|None).*eagle3"):
        registry.of_config(checkpoint.read_config(saved))
    with pytest.raises(CheckpointError, match="architecture"):
        Eagle3().load(saved)


# What a crash may do.


class Killed(BaseException):
    """Stands for the end of the process: nothing may run after it."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the process at the `step`-th change of a directory, counted from 0: neither it nor any later one happens."""
    done = 0

    def guard(change: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done > step:
                raise Killed
            return change(*arguments, **options)

        return guarded

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "remove", "rmdir"):
            patch.setattr(os, name, guard(getattr(os, name)))
        patch.setattr(checkpoint, "_exchange", guard(checkpoint._exchange))
        try:
            yield
        except Killed:
            return
    pytest.fail("survived")


def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before any change of a directory, the checkpoint at the path is the old one or the new one, and whole."""
    old, new = (checkpoint.digest_of(state_of(seed)) for seed in (0, 1))
    seen = []
    for step in range(20):
        checkpoint.save(saved, state_of(), draft_config())
        try:
            with killed_at(step, monkeypatch):
                checkpoint.save(saved, state_of(seed=1), draft_config())
        except pytest.fail.Exception:
            break
        model, _ = Eagle3().load(saved)
        seen.append(checkpoint.digest_of(model.state_dict()))
    assert seen[0] == old, "the first change of a directory comes after the new checkpoint was written"
    assert seen[-1] == new
    assert set(seen) == {old, new}


def test_a_failed_write_leaves_the_old_checkpoint_and_no_litter(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(saved, state_of(seed=1), draft_config())
    assert checkpoint.digest_of(checkpoint.read_state(saved)) == checkpoint.digest_of(state_of())
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_a_file_system_that_cannot_exchange_folders_still_saves(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_exchange", lambda *_: False)
    checkpoint.save(saved, state_of(seed=1), draft_config())
    assert checkpoint.digest_of(checkpoint.read_state(saved)) == checkpoint.digest_of(state_of(seed=1))
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_without_exchange_a_failed_rename_puts_the_old_checkpoint_back(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, calls = os.rename, []

    def second_fails(source: Any, destination: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("input/output error")
        rename(source, destination)

    monkeypatch.setattr(checkpoint, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="input/output"):
        checkpoint.save(saved, state_of(seed=1), draft_config())
    assert checkpoint.digest_of(checkpoint.read_state(saved)) == checkpoint.digest_of(state_of())
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


# Digests.


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_digest_changes_with_one_bit(data: st.DataObject) -> None:
    """B1: no change is too small, in whatever tensor."""
    state = state_of()
    name = data.draw(st.sampled_from(sorted(state)))
    flat = state[name].view(torch.uint8).view(-1)
    before = checkpoint.digest_of(state)
    position, bit = data.draw(st.integers(0, flat.shape[0] - 1)), data.draw(st.integers(0, 7))
    # A bool has one bit that may change.
    flat[position] ^= 1 if state[name].dtype == torch.bool else 1 << bit
    assert checkpoint.digest_of(state) != before


def test_a_digest_does_not_depend_on_the_mapping_s_order_or_on_strides() -> None:
    state = state_of()
    turned = dict(reversed(state.items()))
    turned["fc.weight"] = turned["fc.weight"].T.contiguous().T
    assert list(turned) != list(state)
    assert checkpoint.digest_of(turned) == checkpoint.digest_of(state)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(2, 3)},
        {"b": torch.zeros(6)},
        {"a": torch.zeros(6, dtype=torch.int32)},
        {"a": torch.zeros(3), "b": torch.zeros(3)},
        {"a": torch.zeros(6), "b": torch.zeros(0)},
    ],
    ids=["shape", "name", "dtype", "cut in two", "an empty one more"],
)
def test_a_digest_tells_apart_what_has_the_same_bytes(other: State) -> None:
    assert checkpoint.digest_of(other) != checkpoint.digest_of({"a": torch.zeros(6)})


def test_scalars_have_digests_too() -> None:
    assert checkpoint.digest_of({"a": torch.tensor(1.0)}) != checkpoint.digest_of({"a": torch.tensor(2.0)})


# What engines read beside the weights.


@pytest.fixture
def saved_dflash(tmp_path: Path) -> Path:
    """A good checkpoint of a DFlash draft."""
    DFlash().save(tmp_path / "dflash", dflash_draft(dtype=torch.float32).state_dict(), dflash_config())
    return tmp_path / "dflash"


def test_the_mask_embedding_lies_where_vllm_looks_for_it(saved_dflash: Path) -> None:
    """In a file of its own with the id it stands for; and among the weights, so that whoever reads them has all of the draft."""
    found = torch.load(saved_dflash / "mask_embedding.pt", weights_only=True)
    state = checkpoint.read_state(saved_dflash)
    assert torch.equal(found["embedding"], state["mask_embedding"])
    assert found["mask_token_id"] == dflash_config()["dflash_config"]["mask_token_id"]
    model, config = registry.of_config(checkpoint.read_config(saved_dflash)).load(saved_dflash)
    assert config == dflash_config()
    assert checkpoint.digest_of(model.state_dict()) == checkpoint.digest_of(dflash_draft(dtype=torch.float32).state_dict())


def test_saving_again_replaces_the_files_beside_the_weights_too(saved_dflash: Path) -> None:
    other = {
        name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in checkpoint.read_state(saved_dflash).items()
    }
    DFlash().save(saved_dflash, other, dflash_config())
    found = torch.load(saved_dflash / "mask_embedding.pt", weights_only=True)
    assert torch.equal(found["embedding"], other["mask_embedding"])
    (saved_dflash / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"no draft checkpoint \(notes.txt\)"):
        DFlash().save(saved_dflash, other, dflash_config())


def test_a_draft_of_one_type_is_not_saved_over_one_of_another(saved_dflash: Path) -> None:
    with pytest.raises(CheckpointError, match="is there and is no draft checkpoint"):
        Eagle3().save(saved_dflash, state_of(), draft_config())
