"""What training takes and costs, before and after: commands."""
