"""Soft cross-entropy of a draft against its teacher, without the logits of all rows at once and over a split vocabulary."""

from specdraft_kernels.distill_loss.api import BACKENDS, distill_loss
from specdraft_kernels.distill_loss.teacher import Teacher, TeacherLogits, TeacherStates

__all__ = ["BACKENDS", "Teacher", "TeacherLogits", "TeacherStates", "distill_loss"]
