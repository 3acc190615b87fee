"""What runs in children, next to `farm.runner` and nothing else of the farm."""
