"""The platform and the people around it: commands."""
