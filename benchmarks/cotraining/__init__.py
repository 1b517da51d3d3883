"""A small policy on every layout, and what co-training a draft beside it does and costs."""
