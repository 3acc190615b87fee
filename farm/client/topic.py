"""Topics of a client: what it can do with one kind of thing, imported and made when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.client.transport import Transport


class Api:
    """What a farm answers about one topic, such as `client.workers`."""

    def __init__(self, client: FarmClient, transport: Transport) -> None:
        self._client, self._transport = client, transport

    @classmethod
    def of(cls, client: FarmClient) -> Self:
        """Return this topic of a client: for those of extensions, which a type checker does not see at the client."""
        return cls(client, client.transport)


A = TypeVar("A", bound=Api)


class Topic(Generic[A]):
    """The attribute of a client that is its `Api` of one topic; `module` of `farm.client` has that class."""

    def __init__(self, module: str, kind: str) -> None:
        self._module, self._kind = module, kind

    def __set_name__(self, client: type, name: str) -> None:
        self._name = name

    def __get__(self, client: FarmClient | None, _: type) -> A:
        """Make the API; the attribute is the API from then on."""
        if client is None:  # It is asked of the class, such as for help.
            return self  # type: ignore[return-value]
        kind: type[A] = getattr(import_module(f"farm.client.{self._module}"), self._kind)
        made: A = client.__dict__.setdefault(self._name, kind(client, client.transport))
        return made
