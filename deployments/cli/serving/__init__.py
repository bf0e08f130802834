"""Endpoints and what they answer: commands."""
