//! Which addresses a worker may have, and which of them are the same.
//!
//! One rule for every place that a router connects to on somebody's word: no address of the link, of a cloud's
//! metadata, of many hosts or of none; and no number that only some readers take for an address.

use http::uri::Authority;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Names and addresses under which clouds tell a machine its secrets, beside those of the link.
const METADATA_NAMES: [&str; 2] = ["metadata", "metadata.google.internal"];
const METADATA_V4: [Ipv4Addr; 2] = [
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

/// The host of `HOST:PORT`, if a worker may be there.
pub fn host_of(authority: &str) -> Option<String> {
    let parsed = authority.parse::<Authority>().ok()?;
    let is_whole = parsed.port_u16().is_some_and(|port| port > 0)
        && !matches!(parsed.host(), "" | "*")
        && !authority.contains('@');
    (is_whole && may_be_worker(parsed.host())).then(|| parsed.host().to_owned())
}

/// Whether `host` is a name, or an address of one host that is no cloud's metadata.
fn may_be_worker(host: &str) -> bool {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    match address_of(&name) {
        Some(address) => is_worker_address(address),
        None => !ends_in_number(&name) && !METADATA_NAMES.contains(&&*name),
    }
}

/// Whether an address is one of one host that is no cloud's metadata.
pub fn is_worker_address(address: IpAddr) -> bool {
    match plain(address) {
        IpAddr::V4(address) => {
            !(address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || METADATA_V4.contains(&address))
        }
        IpAddr::V6(address) => {
            !(address.is_unicast_link_local() || address.is_multicast() || address == METADATA_V6)
        }
    }
}

/// The address that a host is, where it is none by name.
fn address_of(host: &str) -> Option<IpAddr> {
    host.trim_matches(['[', ']']).parse().ok().map(plain)
}

/// An IPv4 address that is written as one of IPv6 is the former.
fn plain(address: IpAddr) -> IpAddr {
    let IpAddr::V6(address) = address else {
        return address;
    };
    let [a, b, .., c, d] = address.segments();
    let embedded = match address.to_ipv4_mapped() {
        Some(mapped) => Some(mapped),
        // A translator's prefix.
        None if (a, b) == (0x64, 0xff9b) => {
            let [e, f] = c.to_be_bytes();
            let [g, h] = d.to_be_bytes();
            Some(Ipv4Addr::new(e, f, g, h))
        }
        None => None,
    };
    embedded.map_or(IpAddr::V6(address), IpAddr::V4)
}

/// Whether some readers take a host for an address that is written in no usual way: `2852039166`, `0xa9fea9fe`,
/// `127.1`, `0177.0.0.1`.
fn ends_in_number(host: &str) -> bool {
    let last = host.rsplit('.').next().unwrap_or(host);
    let hex = last.strip_prefix("0x");
    let is_hex = hex.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    is_hex || (!last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit()))
}

/// `HOST:PORT` under the one name that all names of its host share which are known to be the same.
pub fn canonical(authority: &str) -> String {
    let (host, port) = authority.rsplit_once(':').unwrap_or((authority, ""));
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let is_here = host == "localhost"
        || host.ends_with(".localhost")
        || address_of(&host).is_some_and(|address| {
            address.is_unspecified()
                || address == IpAddr::V4(Ipv4Addr::LOCALHOST)
                || address == IpAddr::V6(Ipv6Addr::LOCALHOST)
        });
    let port = port.trim_start_matches('0');
    match address_of(&host) {
        _ if is_here => format!("localhost:{port}"),
        Some(address) => format!("{address}:{port}"),
        None => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_one_host_and_no_clouds_metadata() {
        for host in [
            "10.0.0.7",
            "127.0.0.1",
            "0.0.0.0",
            "gpu1",
            "gpu1.example.org",
            "node-7.",
            "[::1]",
            "[fd00::1]",
            "9gpus.example",
        ] {
            assert!(host_of(&format!("{host}:8000")).is_some(), "{host}");
        }
        for host in [
            "169.254.169.254",
            "169.254.0.1",
            "100.100.100.200",
            "224.0.0.1",
            "255.255.255.255",
            "metadata.google.internal",
            "METADATA.google.internal.",
            "[fe80::1]",
            "[ff02::1]",
            "[fd00:ec2::254]",
            "[::ffff:169.254.169.254]",
            "[::ffff:a9fe:a9fe]",
            "[64:ff9b::a9fe:a9fe]",
            "2852039166",
            "0xa9fea9fe",
            "0xA9.254.169.254",
            "0251.0376.0251.0376",
            "169.254.43518",
            "127.1",
            "1.2.3.4.5",
            "300.1.1.1",
            "10.0.0.0x7",
        ] {
            assert_eq!(host_of(&format!("{host}:8000")), None, "{host}");
        }
    }

    #[test]
    fn names_of_one_host_are_one_name() {
        for authority in [
            "localhost:8000",
            "LOCALHOST.:8000",
            "a.localhost:8000",
            "127.0.0.1:8000",
            "0.0.0.0:8000",
            "[::1]:8000",
            "[::]:8000",
            "[0:0:0:0:0:0:0:1]:8000",
            "[::ffff:127.0.0.1]:8000",
            "127.0.0.1:08000",
        ] {
            assert_eq!(canonical(authority), "localhost:8000", "{authority}");
        }
        assert_eq!(canonical("GPU1.example.:9"), canonical("gpu1.EXAMPLE:9"));
        assert_eq!(canonical("[FD00::0:1]:9"), canonical("[fd00::1]:9"));
        assert_ne!(canonical("10.0.0.1:9"), canonical("10.0.0.2:9"));
        assert_ne!(canonical("gpu1:9"), canonical("gpu1:90"));
    }
}
