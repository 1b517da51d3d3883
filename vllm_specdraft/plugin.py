"""The entry point that vLLM calls in every one of its processes.

Imports nothing at the top: a plugin that fails to import is logged and ignored by vLLM, one whose `register` raises stops the
process. And it does nothing at all unless this process was started by `specdraft serve` (or with the same environment).
"""


def register() -> None:
    """Install the plugin's patches when this process was asked to; harmless when called again."""
    from vllm_specdraft.config import EngineConfig

    if EngineConfig.from_environment() is None:
        return
    from vllm_specdraft import compat, patches

    compat.probe()
    patches.install()
