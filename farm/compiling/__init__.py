"""Compiling: one attempt of a job, from its work order to a checked and measured program, in sealed children."""
