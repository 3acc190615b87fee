"""Metrics: what a process counts and times, and the text in which Prometheus reads it."""
