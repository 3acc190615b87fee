"""Models: what the farm reads of a model: its file, its inputs and their shapes, the data that goes with it."""
