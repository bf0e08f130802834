"""Where and when flows run: the command line, the local platform, the shipped configurations."""
