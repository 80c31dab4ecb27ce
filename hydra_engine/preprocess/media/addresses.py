"""Network addresses that a picture may be fetched from: public ones, in whatever form an address is written.

Pure rules over host names and addresses that somebody else has resolved. Does not open or resolve anything.
"""

from __future__ import annotations

import ipaddress
import re

from hydra_engine.errors import MediaForbidden

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
# A host whose last label is a number is an address to some resolver: 127.1, 0x7f.0.0.1, 2130706433, 0177.0.0.1.
_NUMBER = re.compile(r"(?:\d+|0[xX][0-9a-fA-F]*)")
_NAME = re.compile(r"[A-Za-z0-9_\-.]{1,253}")  # international names come in their ASCII form
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")  # younger than what some Pythons know


def literal(host: str) -> IPAddress | None:
    """The address that a host spells, None for a name. Raises MediaForbidden for odd spellings of an address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and "%" not in host:
        return address
    if not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        raise MediaForbidden("the image URL's host is not a plain name or address")
    return None


def is_port_for_media(port: int) -> bool:
    """HTTP's own and those that any user's server may have: a GET must not be what a mail server or a shell reads."""
    return port in (80, 443) or 1024 <= port <= 65535


def is_public(address: IPAddress) -> bool:
    """Globally routable, and so is every IPv4 address inside an IPv6 one."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not address.is_reserved
    translated = address.ipv4_mapped is not None or address in _NAT64
    if address in _DOCUMENTATION:
        return False
    return (address in _GLOBAL_UNICAST or translated) and all(is_public(inner) for inner in _embedded(address))


def _embedded(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses that a tunnel, a translator or the kernel would take out of this one."""
    low = int(address) & 0xFFFFFFFF
    embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64 or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        embedded.append(ipaddress.IPv4Address(low))
    return [inner for inner in embedded if inner is not None]
