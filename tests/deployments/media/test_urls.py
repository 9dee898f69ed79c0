import ipaddress
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from deployments.errors import FetchRefused
from deployments.media.urls import UrlPolicy
from tests.support.hostile_urls import HOSTILE, MALFORMED

POLICY = UrlPolicy()


@pytest.mark.parametrize("host", HOSTILE)
def test_hosts_inside_the_network_are_refused(host: str) -> None:
    for url in (f"http://{host}/", f"https://{host}:8443/x?y", f"HTTP://{host}"):
        with pytest.raises(FetchRefused) as refused:
            POLICY.check_url(url)
        assert refused.value.message.endswith((".", ")"))
        assert host not in refused.value.message or len(host) < 3


@pytest.mark.parametrize("url", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_and_foreign_urls_are_refused(url: str) -> None:
    with pytest.raises(FetchRefused, match=r"^The media URL"):
        POLICY.check_url(url)


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://example.com", "http://example.com/"),
        ("HTTPS://EXAMPLE.com/A.PNG", "https://example.com/A.PNG"),
        ("http://example.com?x=1", "http://example.com/?x=1"),
        ("http://example.com:8080/%7Ea/%2e%2E/b%2Fc?q=%20+&a==b;c#part", "http://example.com:8080/%7Ea/%2e%2E/b%2Fc?q=%20+&a==b;c"),
        ("http://example.com/a b/ä", "http://example.com/a%20b/%C3%A4"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/"),
        ("http://a_b.example./x", "http://a_b.example./x"),
        ("http://8.8.8.8/x", "http://8.8.8.8/x"),
        ("http://[2606:4700::1111]:81/x", "http://[2606:4700::1111]:81/x"),
        ("http://[::ffff:8.8.8.8]/", "http://[::ffff:8.8.8.8]/"),
        ("http://localhost/", "http://localhost/"),  # a name: its address is checked later
        ("http://example.com/{a}|^`<>\"'", "http://example.com/{a}|^`<>\"'"),
    ],
)  # fmt: skip
def test_allowed_urls_are_sent_unchanged(url: str, sent: str) -> None:
    assert POLICY.check_url(url) == sent
    assert str(URL(sent, encoded=True)) == sent


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    POLICY.check_address(address)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "a loopback address"),
        ("::1", "a loopback address"),
        ("10.1.2.3", "a private address"),
        ("fd00:ec2::254", "a private address"),
        ("169.254.169.254", "a link-local address"),
        ("fe80::1%eth0", "a link-local address"),
        ("100.64.0.1", "a carrier-grade NAT address"),
        ("168.63.129.16", "a cloud metadata address"),
        ("239.0.0.1", "a multicast address"),
        ("255.255.255.255", "a reserved address"),
        ("::ffff:10.0.0.1", "a private address"),
        ("4000::1", "a reserved address"),
    ],
)
def test_a_refusal_names_the_reason_and_not_the_address(address: str, reason: str) -> None:
    with pytest.raises(FetchRefused, match=f"leads to {reason}, which this server") as refused:
        POLICY.check_address(address)
    assert address.partition("%")[0] not in refused.value.message


@given(st.integers(0, 2**32 - 1).map(ipaddress.IPv4Address))
@example(ipaddress.IPv4Address("192.0.0.9"))
def test_ipv4_addresses_that_are_not_global_are_refused(address: ipaddress.IPv4Address) -> None:
    spellings = [str(address), f"::ffff:{address}", f"64:ff9b::{address}"]
    if not address.is_global or address.is_multicast:
        for spelling in spellings:
            with pytest.raises(FetchRefused):
                POLICY.check_address(spelling)


@given(st.integers(0, 2**128 - 1).map(ipaddress.IPv6Address))
def test_ipv6_addresses_that_are_not_global_are_refused(address: ipaddress.IPv6Address) -> None:
    if address.ipv4_mapped is None and (not address.is_global or address.is_multicast):
        with pytest.raises(FetchRefused):
            POLICY.check_address(str(address))


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{}", "{:#x}", "0{:o}"]))
def test_an_address_written_as_one_number_is_refused(number: int, spelling: str) -> None:
    with pytest.raises(FetchRefused, match=r"unusual spelling|leads to"):
        POLICY.check_url(f"http://{spelling.format(number)}/")


@given(st.text(max_size=60), st.text("0123456789.x:[]@\\/%#?a", max_size=30))
def test_the_http_client_reads_an_accepted_url_the_same_way(text: str, tail: str) -> None:
    for url in (text, "http://" + text, "http://" + tail, "http://example.com" + tail):
        try:
            sent = POLICY.check_url(url)
        except FetchRefused:
            continue
        parsed = URL(sent, encoded=True)
        assert parsed.scheme in ("http", "https")
        assert parsed.user is None
        assert parsed.password is None
        host = sent.split("/")[2]
        assert parsed.raw_authority == host
        assert sent.isascii()
        assert not numeric(str(parsed.host)) or str(ipaddress.ip_address(str(parsed.host)))
        assert POLICY.check_url(sent) == sent


def numeric(host: str) -> bool:
    try:
        socket.inet_aton(host.rstrip("."))
    except OSError:
        return False
    return True


def test_only_allowed_domains_pass() -> None:
    policy = UrlPolicy.of(["Media.Example.COM", "cdn.example."], [])
    for url in ("http://media.example.com/", "https://MEDIA.example.com.:444/x", "http://cdn.example/"):
        policy.check_url(url)
    for url in (
        "http://example.com/",
        "http://media.example.com.evil.org/",
        "http://x.cdn.example/",
        "http://8.8.8.8/",
    ):
        with pytest.raises(FetchRefused, match="not among this server's allowed media domains"):
            policy.check_url(url)


def test_allowed_domains_do_not_open_private_networks() -> None:
    with pytest.raises(FetchRefused, match="a loopback address"):
        UrlPolicy.of(["127.0.0.1"], []).check_url("http://127.0.0.1/")


def test_allowed_private_networks_pass() -> None:
    policy = UrlPolicy.of([], ["127.0.0.0/8", "10.1.0.0/16", "fd00::/8"])
    for address in ("127.0.0.1", "10.1.2.3", "fd00::1", "::ffff:127.0.0.1"):
        policy.check_address(address)
    assert policy.check_url("http://127.0.0.1:81/x") == "http://127.0.0.1:81/x"
    for address in ("10.2.0.1", "::1", "169.254.169.254"):
        with pytest.raises(FetchRefused):
            policy.check_address(address)
    with pytest.raises(FetchRefused, match="unusual spelling"):
        policy.check_url("http://127.1/")


def test_an_invalid_network_is_refused() -> None:
    with pytest.raises(ValueError, match="not appear to be an IPv4 or IPv6 network"):
        UrlPolicy.of([], ["10.0.0.0/33"])
