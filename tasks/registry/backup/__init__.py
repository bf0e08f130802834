"""Backup of a home into another store, restore into an empty home, and the drill that proves both. See docs/backup.md."""
