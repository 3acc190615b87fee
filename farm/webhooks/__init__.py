"""Webhooks: tells other servers what happened, as Standard Webhooks says: signed, tried again, replayable, logged."""
