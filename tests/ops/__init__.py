"""Tests of operators. Triton reads TRITON_INTERPRET when it is imported: here it is, with its kernels, for this process.

The variable is taken away again: a server that another test starts must not inherit it. Tests set it around each call.
"""

import os
import sys

assert "triton" not in sys.modules, "triton was imported before TRITON_INTERPRET was set: its kernels would want a GPU"
os.environ["TRITON_INTERPRET"] = "1"
try:
    import specdraft_kernels.distill_loss.fused
    import specdraft_kernels.interval_attention.fused  # noqa: F401
finally:
    del os.environ["TRITON_INTERPRET"]
