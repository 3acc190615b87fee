"""Signing: who made a program and how it was tested, as signed statements, and what a reader accepts of them."""
