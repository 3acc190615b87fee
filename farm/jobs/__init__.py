"""Jobs: what one is, which states it has and how it moves between them. Pure; does no I/O."""
