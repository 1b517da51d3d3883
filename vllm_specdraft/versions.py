"""The label that the engine puts on every token: which policy and which draft it came from.

vLLM keeps one string per engine for the weights it serves and attaches it to the tokens of each step. Ours names both models.
"""

from __future__ import annotations

import re

# No more digits than a 64-bit integer takes: whoever sets a label by hand may write anything.
_LABEL = re.compile(r"policy-([0-9]{1,18})/draft-([0-9]{1,18})")


def version_label(policy: int, draft: int) -> str:
    """The engine's name for a pair of versions.

    >>> version_label(3, 7)
    'policy-3/draft-7'
    """
    return f"policy-{policy}/draft-{draft}"


def parse_label(label: str) -> tuple[int, int] | None:
    """Policy and draft version of a label, None when it is none of ours (vLLM's own is ``default``).

    >>> parse_label("policy-3/draft-7")
    (3, 7)
    """
    found = _LABEL.fullmatch(label)
    return (int(found[1]), int(found[2])) if found else None
