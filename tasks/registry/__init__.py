"""Records of done stages, refs that move, the audit log: what is true about the past, kept in the store."""
