"""Node: what runs on a worker node, from its supervisor to the executor of one attempt."""
