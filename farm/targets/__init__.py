"""Targets: what a program may be compiled for, and what the farm must know of each compiler, as data."""
