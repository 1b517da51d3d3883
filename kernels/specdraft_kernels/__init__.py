"""Operators of draft training, each a folder: a reference in plain PyTorch, faster backends beside it, one API in front."""
