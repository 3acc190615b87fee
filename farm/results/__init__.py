"""Results: what is said of a finished program: how right, how fast, and what that means for its build."""
