//! Peers that are gone without a word: a host that lost its power or its network, a laptop that sleeps, an
//! address translation that forgot the connection. Nothing comes from them, no end of the connection either, and
//! what a request holds would be held until its deadline. So quiet connections are probed by the kernel, and one on
//! which what was sent is not acknowledged ends after the same time.

use super::resolve::Connector;
use socket2::{SockRef, TcpKeepalive};
use std::time::Duration;
use tokio::net::TcpListener;

/// How a quiet connection is probed.
struct Probes {
    /// After so long without a word, and then so often.
    idle: Duration,
    interval: Duration,
    /// How many may go unanswered.
    most: u32,
}

/// Workers are few, near and expected to answer.
const OF_WORKERS: Probes = Probes {
    idle: Duration::from_secs(5),
    interval: Duration::from_secs(5),
    most: 3,
};

/// Clients may be many and far away, on networks that lose a probe or are away for a moment.
const OF_CLIENTS: Probes = Probes {
    idle: Duration::from_secs(60),
    interval: Duration::from_secs(15),
    most: 4,
};

impl Probes {
    /// How long a peer may be silent that has been asked or sent something.
    fn patience(&self) -> Duration {
        self.idle + self.interval * self.most
    }
}

/// Has the connections that `connector` makes probed.
pub(super) fn probe_workers(connector: &mut Connector) {
    connector.set_keepalive(Some(OF_WORKERS.idle));
    connector.set_keepalive_interval(Some(OF_WORKERS.interval));
    connector.set_keepalive_retries(Some(OF_WORKERS.most));
    connector.set_tcp_user_timeout(Some(OF_WORKERS.patience()));
}

/// Has the connections that `listener` will accept probed: they have its options. A system that knows some of them
/// not serves all the same.
pub(super) fn probe_clients(listener: &TcpListener) {
    let socket = SockRef::from(listener);
    let probes = TcpKeepalive::new()
        .with_time(OF_CLIENTS.idle)
        .with_interval(OF_CLIENTS.interval)
        .with_retries(OF_CLIENTS.most);
    let set = socket.set_tcp_keepalive(&probes);
    // While something that was sent is not acknowledged there are no probes.
    #[cfg(target_os = "linux")]
    let set = set.and_then(|()| socket.set_tcp_user_timeout(Some(OF_CLIENTS.patience())));
    if let Err(error) = set {
        log::warn!("clients that are gone are noticed late: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpStream;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn accepted_connections_are_probed_and_given_up_after_two_minutes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        probe_clients(&listener);
        let address = listener.local_addr().expect("bound");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (_client, accepted) = (client.expect("connected"), accepted.expect("accepted").0);
        let socket = SockRef::from(&accepted);
        let seconds = Duration::from_secs;
        assert!(socket.keepalive().expect("an option"));
        assert_eq!(socket.tcp_keepalive_time().expect("an option"), seconds(60));
        let interval = socket.tcp_keepalive_interval().expect("an option");
        assert_eq!(interval, seconds(15));
        assert_eq!(socket.tcp_keepalive_retries().expect("an option"), 4);
        let patience = socket.tcp_user_timeout().expect("an option");
        assert_eq!(patience, Some(seconds(120)));
    }
}
