"""Parts of the training job (tasks/jobs/train.py): engines, schedule, safety, meters, reasons to stop. One part a file."""
