"""The frame of a stage: `@stage`, the context that a stage's body uses, the run around it, and who observes it."""
