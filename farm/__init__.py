"""The compile farm: models in, tuned and verified programs for AMD GPUs out."""

__version__ = "0.1.0"
