"""What models are made of: commands."""
