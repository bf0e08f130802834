"""Parts of the program that runs Megatron-LM (tasks/jobs/train_megatron.py): its checkpoints, its log, its converter."""
