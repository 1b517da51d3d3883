"""The demo: an RL-like rhythm of rollouts and pauses on one server, then three arms compared.

The benchmark is made of the same parts.
"""
