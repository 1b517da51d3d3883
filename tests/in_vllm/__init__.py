"""Tests against real vLLM engines on the CPU, with the real default model. Each engine takes about half a minute to start."""
