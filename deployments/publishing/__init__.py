"""Files from outside become versions of a dataset, or of a checkpoint that others trained."""
