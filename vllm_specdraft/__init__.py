"""A vLLM rollout server whose draft model stays fresh while the policy it drafts for is being trained."""

__version__ = "0.1.0"
