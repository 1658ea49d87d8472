//! The addresses behind workers' names, looked up for each connection: one that no worker may have is none,
//! whatever name leads there, and whatever that name meant when the worker was added.

use decision::model::is_worker_address;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use std::io::{Error, Result};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::vec::IntoIter;
use tokio::net::TcpStream;
use tower_service::Service;

pub(crate) type Connector = HttpConnector<Checked>;

/// Asks the machine, and takes what a worker may have.
#[derive(Clone)]
pub(crate) struct Checked(GaiResolver);

pub(super) fn connector() -> Connector {
    HttpConnector::new_with_resolver(Checked(GaiResolver::new()))
}

impl Service<Name> for Checked {
    type Response = IntoIter<SocketAddr>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let host = name.to_string();
        let looked_up = self.0.call(name);
        Box::pin(async move { allowed(&host, looked_up.await?.collect()) })
    }
}

/// Where `tcp://HOST:PORT` is: an address that a worker may have. Of several the first that listens.
pub(super) async fn endpoint(endpoint: &str) -> std::result::Result<String, String> {
    let place = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
    let find = async {
        let found: Vec<SocketAddr> = tokio::net::lookup_host(place).await?.collect();
        let found: Vec<SocketAddr> = allowed(place, found)?.collect();
        let Some(&first) = found.first() else {
            return Err(Error::other("no address"));
        };
        if found.len() == 1 {
            return Ok(first);
        }
        let connected = TcpStream::connect(&found[..]).await;
        let listening = connected.and_then(|stream| stream.peer_addr());
        Ok(listening.unwrap_or(first))
    };
    let found = find.await;
    found
        .map(|address| format!("tcp://{address}"))
        .map_err(|error| format!("{endpoint}: {error}"))
}

/// Those of the addresses of a name that a worker may have.
pub(super) fn allowed(host: &str, mut found: Vec<SocketAddr>) -> Result<IntoIter<SocketAddr>> {
    let had_some = !found.is_empty();
    found.retain(|address| is_worker_address(address.ip()));
    if had_some && found.is_empty() {
        return Err(Error::other(format!(
            "{host} is an address of the link, of a cloud's metadata or of many hosts, which no worker has"
        )));
    }
    Ok(found.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_no_address_that_a_worker_may_not_have() {
        let addresses = |all: &[&str]| {
            let all = all.iter().map(|text| text.parse().expect("an address"));
            all.collect::<Vec<SocketAddr>>()
        };
        let good = addresses(&["10.0.0.7:80", "[fd00::1]:80", "127.0.0.1:80"]);
        let bad = addresses(&[
            "169.254.169.254:80",
            "[fe80::1]:80",
            "[::ffff:169.254.169.254]:80",
            "[64:ff9b::a9fe:a9fe]:80",
            "100.100.100.200:80",
            "224.0.0.1:80",
        ]);
        for address in &bad {
            let refused = allowed("name", vec![*address]);
            assert!(refused.is_err_and(|error| error.to_string().contains("name is")));
        }
        let mixed = [bad, good.clone()].concat();
        let left: Vec<SocketAddr> = allowed("name", mixed).expect("some").collect();
        assert_eq!(left, good);
        assert_eq!(allowed("name", Vec::new()).expect("none").count(), 0);
    }

    #[tokio::test]
    async fn an_endpoint_is_an_address_that_a_worker_may_have() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let address = listener.expect("a port").local_addr().expect("bound");
        let named = format!("tcp://localhost:{}", address.port());
        let found = endpoint(&named).await.expect("an address");
        assert_eq!(found, format!("tcp://{address}"));
        for bad in ["169.254.169.254", "[fe80::1]", "224.0.0.1"] {
            let refused = endpoint(&format!("tcp://{bad}:5557")).await;
            assert!(refused.is_err_and(|error| error.contains(bad)), "{bad}");
        }
    }

    #[tokio::test]
    async fn names_are_still_looked_up() {
        let name = "localhost".parse().expect("a name");
        let mut resolver = Checked(GaiResolver::new());
        let mut found = resolver.call(name).await.expect("addresses");
        assert!(found.all(|address| address.ip().is_loopback()));
    }
}
