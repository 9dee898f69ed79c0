"""URLs that the server must refuse without making a connection."""

from __future__ import annotations

# Spellings by which servers were made to fetch from themselves, their neighbours or their cloud's metadata.
HOSTILE = [
    # loopback
    *("127.0.0.1", "127.0.0.2", "127.255.255.254", "127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "0x7f.1"),
    *("2130706433", "017700000001", "0x7f000001", "0x7F000001", "00000177.0.0.1", "127.0.0.1.", "127.0.0.01"),
    *("0", "0.0.0.0", "0x0", "00", "[::]", "[::1]", "[0:0:0:0:0:0:0:1]", "[0000::0001]", "[::127.0.0.1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[::FFFF:127.0.0.1]"),
    *("[64:ff9b::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]"),
    # private, link-local, metadata
    *("10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1", "0xa.0.0.1", "167772161"),
    *("169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "[::ffff:169.254.169.254]"),
    *("168.63.129.16", "100.100.100.200", "100.64.0.1", "192.0.0.192", "[fd00:ec2::254]", "[fe80::1]"),
    *("[fe80::1%25eth0]", "[fc00::1]", "[fd12:3456::1]", "[fec0::1]"),
    # multicast, reserved, documentation, benchmark
    *(
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "[ff02::1]",
        "192.0.2.1",
        "198.51.100.7",
    ),
    *("203.0.113.9", "198.18.0.1", "192.88.99.1", "[2001:db8::1]", "[100::1]", "[4000::1]", "[3fff::1]"),
    # other scripts' digits and dots, which IDNA folds into ASCII
    *("①②⑦.⓪.⓪.①", "１２７.0.0.1", "127。0。0。1", "127．0．0．1", "[::ﬀff:1]"),
]
# Texts that parsers read in different ways, and texts that are not valid URLs.
MALFORMED = [
    *("http://user@example.com/", "http://user:pass@example.com/", "http://@example.com/", "http://a@b@c/"),
    *(
        "http://example.com\\@127.0.0.1/",
        "http:\\\\127.0.0.1/",
        "http://127.0.0.1\\.example.com/",
        "http:/\\a/",
    ),
    *(
        "http://example.com/a\\b",
        "http://exa\tmple.com/",
        "http://example.com/\n",
        "http://example.com/\r\nX: y",
    ),
    *(
        "http://example.com/\x00",
        "http://example.com\x7f/",
        "http://ex\u2028ample.com/",
        "\x01http://example.com/",
    ),
    *(
        "ftp://example.com/",
        "gopher://example.com/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "dict://a:1/",
    ),
    *(
        "ldap://example.com",
        "jar:http://example.com!/",
        "http:example.com",
        "http:/example.com",
        "//example.com/",
    ),
    *("/etc/passwd", "example.com/a.png", "", "http://", "http:///", "http:///example.com", "http://?x"),
    *("http://[::1", "http://::1/", "http://[::1]x/", "http://[1.2.3.4]/", "http://[]/", "http://[::g]/"),
    *("http://%31%32%37.0.0.1/", "http://example.com%00.evil/", "http://exa mple.com/", "http://a..b/"),
    *(
        "http://.example.com/",
        "http://-.example.com:0/",
        "http://example.com:99999/",
        "http://example.com:8x/",
    ),
    *("http://example.com:-1/", "http://example.com:80:80/", "http://" + "a" * 64 + ".com/", "http://a;b/"),
    *("http://1.2.3/", "http://1.2.3.4.5/", "http://1.2.3.256/", "http://8.8.8.08/", "http://0x08080808/"),
    *("http://example.com/" + "a" * 20_000, "http://" + "a." * 130 + "com/", "http://\ud800.com/"),
]


def targets(port: int) -> list[str]:
    """Returns every hostile spelling, aimed at the port of a listener that must not be reached."""
    hosts = [f"http://{host}:{port}/" for host in [*HOSTILE, "localhost", "LOCALHOST.", "ip6-localhost"]]
    return [*hosts, *(url.replace("127.0.0.1", f"127.0.0.1:{port}") for url in MALFORMED if url)]
