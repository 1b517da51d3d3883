"""The attention under all others here: every query sees one interval of trunk rows, and a few keys of its own group."""

from specdraft_kernels.interval_attention.api import BACKENDS, choose_backend, interval_attention, load_backend
from specdraft_kernels.interval_attention.spans import Spans

__all__ = ["BACKENDS", "Spans", "choose_backend", "interval_attention", "load_backend"]
