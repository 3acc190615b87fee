"""Results: what is said about a finished program: how right, how fast, and what that means for its build."""
