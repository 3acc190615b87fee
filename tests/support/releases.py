"""The code with which this one shares a store while a farm is upgraded: the last release."""

COMMIT = "11f4579b0c60691c90f33da0ea92e9adec09b100"
"""There is no release yet; until 0.2.0 it is a commit of late November 2026."""
