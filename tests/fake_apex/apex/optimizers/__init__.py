"""There, as in the real one."""
