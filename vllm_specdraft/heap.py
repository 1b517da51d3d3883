"""Memory that the allocator keeps goes back to the system in quiet moments, a piece at a time.

Rows of a burst of long answers, batches of a size not seen before: each leaves free pages behind that tcmalloc keeps, and a
server's resident memory creeps up to the sum of all its peaks. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import ctypes

PIECE_BYTES = 64 << 20
"""What is given back at once, as far as free pages are no longer runs: some ten milliseconds."""
_FREE = b"tcmalloc.pageheap_free_bytes"


class Heap:
    """The process's allocator, where it is tcmalloc (see `vllm_specdraft.cpu`); else it does nothing."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether much was freed: what is to go back in the next quiet moment."""
        loaded = ctypes.CDLL(None)
        self._release = getattr(loaded, "MallocExtension_ReleaseToSystem", None)
        self._property = getattr(loaded, "MallocExtension_GetNumericProperty", None)
        if self._release is not None:
            self._release.argtypes, self._release.restype = [ctypes.c_size_t], None

    def free_bytes(self) -> int:
        """Bytes that the allocator holds, nobody uses, and the system could have."""
        found = ctypes.c_size_t(0)
        if self._property is None or not self._property(_FREE, ctypes.byref(found)):
            return 0
        return found.value

    def tidy(self) -> None:
        """Give a piece back where that is wanted."""
        self.wanted = self.wanted and self.give_back()

    def give_back(self, nbytes: int = PIECE_BYTES) -> bool:
        """Give at least `nbytes` back, in whole runs of free pages; whether as much is left."""
        if self._release is None or self.free_bytes() < nbytes:
            return False
        self._release(nbytes)
        return self.free_bytes() >= nbytes
