"""How many draft tokens a step verifies: decided by measurement, per batch size, so that speculation is never slower than none."""
