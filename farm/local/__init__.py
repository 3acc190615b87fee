"""Local: what runs whole on this machine: the embedded farm, and one model without a farm."""
