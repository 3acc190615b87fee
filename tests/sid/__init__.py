"""The farm with a genuine MIGraphX for AMD cards, in a tree of Debian sid, on a machine without a card."""
