"""Webhooks: tells other servers what happened, as Standard Webhooks says: signed, tried again, replayable, logged."""

from farm.extension import Extension, late

extension = Extension(
    name="webhooks",
    routes=["farm.extras.webhooks.webhook_routes:router"],
    loops=late("farm.extras.webhooks.sending:loops"),
    on_finished=late("farm.extras.webhooks.hooks:tell_finished"),
)
