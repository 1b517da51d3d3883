"""Named errors of the library. Each message says what was given, what is needed and which knob to turn."""


class BridgeError(Exception):
    """Base of all errors that this library raises on purpose."""


class SampleError(BridgeError, ValueError):
    """A hidden-state sample breaks the contract of `trainer_bridge.taps`."""


class CheckpointError(BridgeError, ValueError):
    """A draft checkpoint is missing, half-written, foreign, or made for another target."""


class ConfigError(BridgeError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another one."""
