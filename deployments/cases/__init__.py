"""Plans of large trainings that were published, as cases of `headway plan`. Files only."""
