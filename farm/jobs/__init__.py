"""Jobs: their states, and how they move between them. Pure; does no I/O."""
