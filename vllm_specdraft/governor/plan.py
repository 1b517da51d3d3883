"""What the scheduler writes on a step's plan (vLLM's ``SchedulerOutput``) for the workers, by attribute.

Imports neither torch nor vLLM.
"""

FROM_TEXT = "specdraft_from_text"
"""The drafts that this step makes come from matches in the text, not from the draft."""
VERIFIES_TEXT = "specdraft_verifies_text"
"""So did the drafts that it verifies: they say nothing of the draft."""
REPORT = "specdraft_governor"
"""The governor's report, once in a while."""
