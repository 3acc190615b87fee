"""The code with which this one shares a store while a farm is upgraded: the last release."""

COMMIT = "88c21d9e989dad989d3cdc8443898fa309f3b6e8"
"""0.2.0, of 30 November 2026."""
