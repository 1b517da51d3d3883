"""The entry point that vLLM calls in every one of its processes.

Imports nothing at the top: a plugin that fails to import is logged and ignored by vLLM, one whose `register` raises stops the
process. And it does nothing at all unless this process was started by `specdraft serve` (or with the same environment).
"""


def register() -> None:
    """Install the plugin's patches when this process was asked to; harmless when called again."""
    from pathlib import Path

    from vllm_specdraft.config import EngineConfig, SettingsError

    try:
        config = EngineConfig.from_environment()
    except SettingsError as error:
        # One line in place of a traceback through vLLM, and an end that nothing catches by mistake.
        raise SystemExit(f"specdraft: {error}") from None
    if config is None:
        return
    from vllm_specdraft import compat, failures, patches

    failures.watch(Path(config.state_dir))
    compat.probe()
    patches.install()
    patches.weight_transfer_has_our_backend()
