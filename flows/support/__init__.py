"""What several flows share: approvals, pauses, the base model, the end of every run."""
