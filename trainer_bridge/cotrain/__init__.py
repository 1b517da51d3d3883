"""Training a draft beside its policy, inside the trainer: `run` puts it around a schedule, `trainer` is the draft's side."""
