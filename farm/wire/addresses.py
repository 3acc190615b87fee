"""Addresses: whether what others name lies inside the operator's network. Here and nowhere else."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = (ipaddress.ip_network("fec0::/10"), ipaddress.ip_network("3fff::/20"))
"""Site-local addresses and those for examples, which Python (before 3.13, the second) takes for global ones."""


def address_of(text: str) -> Address:
    """Return an address, or the IPv4 address for which an IPv6 address stands."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return address
    teredo = address.teredo
    inner = address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
    if inner is None and address in _TRANSLATED:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inner or address


def is_public(address: Address) -> bool:
    """Whether everybody reaches an address: it is none of a private network, of this machine, or for special use."""
    special = address.is_multicast or address.is_reserved or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not special
