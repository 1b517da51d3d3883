"""Named errors of the library. Each message says what was given, what is needed and which knob to turn."""


class BridgeError(Exception):
    """Base of all errors that this library raises on purpose."""


class SampleError(BridgeError, ValueError):
    """A hidden-state sample breaks the contract of `trainer_bridge.taps`."""


class CheckpointError(BridgeError, ValueError):
    """A draft checkpoint is missing, half-written, foreign, or made for another target."""


class ConfigError(BridgeError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another one."""


class WireError(BridgeError, ValueError):
    """A frame is no message of this protocol: malformed, too large, or of another version."""


class PlanError(BridgeError, ValueError):
    """A tensor's name, shape, dtype or place does not fit what the engine serves, or a tensor is missing."""


class SecurityError(BridgeError, ValueError):
    """An address is open to other machines and nothing keeps them out, or a key is missing or wrong."""


class UpdateError(BridgeError, RuntimeError):
    """An update was refused or aborted; every engine it names serves the version it served before."""


class BaseVersionError(UpdateError):
    """A delta was offered against a version that the engine does not hold: send the full weights."""


class DeadlineError(UpdateError, TimeoutError):
    """An engine, or the other ranks, did not answer in time."""


class DeltaError(BridgeError, ValueError):
    """A sparse update is malformed, or made for another tensor; nothing was written."""


class ShardError(BridgeError, ValueError):
    """A box does not lie inside its tensor."""


class WeightSourceError(BridgeError, ValueError):
    """A trainer's module cannot be given as checkpoint tensors in the way that was asked for."""


class UnmergedAdapterError(WeightSourceError):
    """The model carries adapters (LoRA and the like) that are not merged into its weights."""


class TapError(BridgeError, RuntimeError):
    """Taps on their way from a pipeline stage to the draft were lost, late, or not what they should be."""


class TapDeadlineError(TapError, TimeoutError):
    """A stage waited longer than it may: for taps that did not come, or for a slot that nobody freed."""


class TapPeerError(TapError):
    """The process at the other end of a tap channel is gone."""


class TapOrderError(TapError):
    """Taps came twice, or of another step than the one that runs."""


class TapOverrunError(TapError):
    """Taps are larger than their slot, or a slot was written while it was read."""


class TapShapeError(TapError, ValueError):
    """Taps have another number of rows, columns or layers, or another dtype, than the draft expects."""
