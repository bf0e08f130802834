"""What is trained, and where: the shipped configurations. Files only."""
