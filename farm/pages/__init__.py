"""The pages that people look at: `…_pages.py` answer requests, pure modules next to them decide what is shown."""
