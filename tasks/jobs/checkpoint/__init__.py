"""Checkpoints of training: snapshot.py is a rank's side, writer.py the process that writes, files.py the format on disk."""
