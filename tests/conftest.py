"""Imports Triton for its interpreter before anything else can import it without."""

import tests.ops  # noqa: F401
