"""Machines and the jobs on them: commands."""
