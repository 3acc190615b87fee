"""Builds: accepted, read, judged and finished, on the server's side."""
