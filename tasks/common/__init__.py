"""What every package may import: errors, processes, redaction, names of files. It imports nothing of Headway."""
