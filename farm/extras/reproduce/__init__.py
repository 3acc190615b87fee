"""`farm reproduce`: an attempt as a folder that runs without a farm."""
