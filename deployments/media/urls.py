"""Decides which URLs and addresses the server may contact for a client, without DNS, sockets or files.

A server that fetches the URLs of strangers is a way into the network it runs in (SSRF). So everything is
refused that is not plainly a public http(s) URL. `check_url` checks the text before any DNS lookup.
`check_address` checks every address before the connection is made, on every hop of a redirect.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import quote

import idna

from deployments.errors import FetchRefused

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_URL_CHARS = 16 * 1024  # presigned URLs run to 2 KB

_REFUSED_NETWORKS: list[tuple[Network, str]] = [
    (ipaddress.ip_network(network), reason)
    for network, reason in [
        ("0.0.0.0/8", "an address of this machine"),  # Linux connects 0.0.0.0 to loopback
        ("127.0.0.0/8", "a loopback address"),  # services that trust every local process
        ("10.0.0.0/8", "a private address"),  # RFC 1918: the network behind the firewall
        ("172.16.0.0/12", "a private address"),  # RFC 1918, and the default of Docker
        ("192.168.0.0/16", "a private address"),  # RFC 1918
        ("100.64.0.0/10", "a carrier-grade NAT address"),  # RFC 6598; Alibaba's metadata; Tailscale
        ("169.254.0.0/16", "a link-local address"),  # cloud metadata hands out credentials here
        ("168.63.129.16/32", "a cloud metadata address"),  # Azure's wire server looks public
        ("192.0.0.0/24", "a reserved address"),  # RFC 6890; Oracle's metadata
        ("192.0.2.0/24", "a documentation address"),  # RFC 5737: never public, so networks use it inside
        ("198.51.100.0/24", "a documentation address"),
        ("203.0.113.0/24", "a documentation address"),
        ("192.88.99.0/24", "a reserved address"),  # 6to4 relays: leads to an embedded address
        ("198.18.0.0/15", "a reserved address"),  # RFC 2544 benchmarks: used as private space
        ("224.0.0.0/4", "a multicast address"),  # reaches many machines of the local network
        ("240.0.0.0/4", "a reserved address"),  # broadcast included
        ("::/128", "an address of this machine"),
        ("::1/128", "a loopback address"),
        ("fc00::/7", "a private address"),  # unique local; AWS metadata over IPv6
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a private address"),  # site local, deprecated but routed
        ("ff00::/8", "a multicast address"),
        ("2001::/23", "a reserved address"),  # Teredo and other tunnels with an IPv4 address inside
        ("2001:db8::/32", "a documentation address"),
        ("2002::/16", "a reserved address"),  # 6to4: an IPv4 address inside
        ("3fff::/20", "a documentation address"),
    ]
]
# The only part of IPv6 from which public addresses are assigned; the rest is reserved or local.
_PUBLIC_V6 = IPv6Network("2000::/3")
# IPv6 addresses that contain an IPv4 address. The one inside is checked, because it is the one reached.
_WRAPPED_V4 = [
    IPv6Network("::ffff:0:0/96"),  # mapped: the kernel dials IPv4
    IPv6Network("64:ff9b::/96"),  # NAT64: the gateway dials IPv4; DNS64 makes these for public hosts
]

_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE | re.DOTALL)
# Narrow, so that no two parsers can disagree about where the host begins and ends.
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@%\s]+)(?::([0-9]{1,5})?)?", re.IGNORECASE)
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BAD_HOST = "The media URL has no valid host name. Correct it."
_PRINTABLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True)
class UrlPolicy:
    allowed_domains: frozenset[str] = frozenset()  # lower case; empty: every public host is allowed
    allowed_networks: tuple[Network, ...] = ()  # allowed although not public

    @classmethod
    def of(cls, domains: list[str], networks: list[str]) -> UrlPolicy:
        """Builds a policy from the configured strings. Raises ValueError if a network is not a valid CIDR."""
        return cls(
            frozenset(domain.lower().rstrip(".") for domain in domains),
            tuple(ipaddress.ip_network(network) for network in networks),
        )

    def check_url(self, url: str) -> str:
        """Returns the URL to send: unchanged but for the fragment and for characters to be escaped.

        Raises FetchRefused for anything but a plain http(s) URL to an allowed host.
        """
        if len(url) > MAX_URL_CHARS:
            raise FetchRefused(
                f"The media URL is longer than {MAX_URL_CHARS} characters. Send the data inline."
            )
        if CONTROL_CHARACTERS.search(url):
            raise FetchRefused("The media URL contains control characters. Percent-encode them.")
        if "\\" in url:  # a separator to some parsers and part of the host to others
            raise FetchRefused("The media URL contains a backslash. Percent-encode it as %5C.")
        parts = _URL.fullmatch(url.partition("#")[0])
        if not parts:
            raise FetchRefused("The media URL must begin with http://, https:// or data:.")
        scheme, authority, rest = parts.groups()
        if "@" in authority:  # http://trusted.example@evil.example/
            raise FetchRefused("The media URL contains a user name or password. Remove the part before @.")
        host, port = _split(authority)
        self._check_host(host)
        path = quote(rest if rest.startswith("/") else "/" + rest, safe=_PRINTABLE_ASCII)
        return f"{scheme.lower()}://{host}{port}{path}"

    def check_address(self, text: str) -> None:
        """Raises FetchRefused, without the address, unless it is public or in an allowed network."""
        try:
            address: Address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            raise FetchRefused("The media URL's host has no valid IP address. Use another host.") from None
        if reason := self._refusal(address):
            raise FetchRefused(
                f"The media URL leads to {reason}, which this server does not contact. Use a public URL or"
                " send the data inline."
            )

    def _refusal(self, address: Address) -> str | None:
        if any(address.version == net.version and address in net for net in self.allowed_networks):
            return None
        if isinstance(address, IPv6Address):
            if any(address in net for net in _WRAPPED_V4):
                return self._refusal(IPv4Address(address.packed[-4:]))
            if address in _PUBLIC_V6:
                return _listed(address)
            return _listed(address) or "a reserved address"
        return _listed(address)

    def _check_host(self, host: str) -> None:
        name = host.rstrip(".") if not host.endswith("..") else host
        if self.allowed_domains and name not in self.allowed_domains:
            raise FetchRefused(
                "The media URL's host is not among this server's allowed media domains. Send the data inline."
            )
        if host.startswith("["):
            try:
                IPv6Address(host[1:-1])
            except ValueError:
                raise FetchRefused("The media URL's host is not a valid IPv6 address. Correct it.") from None
            self.check_address(host[1:-1])
        elif _NUMBER.fullmatch(name.rpartition(".")[2]):
            # 127.1, 0177.0.0.1, 0x7f000001 and 2130706433 are all 127.0.0.1 to some parser.
            try:
                IPv4Address(host)
            except ValueError:
                raise FetchRefused(
                    "The media URL's host is an IP address in an unusual spelling. Write it as four decimal"
                    " numbers."
                ) from None
            self.check_address(host)


def _split(authority: str) -> tuple[str, str]:
    """Returns the host, in lower case and ASCII, and the port, as ":8080" or ""."""
    parts = _AUTHORITY.fullmatch(authority)
    if not parts:
        raise FetchRefused(_BAD_HOST)
    host, port = parts[1].lower(), parts[2]
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode()
        except idna.IDNAError:
            raise FetchRefused(_BAD_HOST) from None
    if not host.startswith("["):
        labels = (host[:-1] if host.endswith(".") else host).split(".")
        if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
            raise FetchRefused(_BAD_HOST)
    if port and not 0 < int(port) < 65536:
        raise FetchRefused("The media URL's port is not between 1 and 65535. Correct it.")
    return host, f":{int(port)}" if port else ""


def _listed(address: Address) -> str | None:
    return next(
        (why for net, why in _REFUSED_NETWORKS if net.version == address.version and address in net), None
    )
