//! Asks another router before the same workers whether it is there, and so which part of them is this one's.

use super::Gateway;
use std::sync::Weak;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);
/// A peer that has not answered for so long is gone. Until then its part stays its own: what it left running is in
/// the workers' load reports by then.
const GONE_AFTER: Duration = Duration::from_secs(5);

pub(super) async fn watch(gateway: Weak<Gateway>, peer: String) {
    let url = format!("{}/health", peer.trim_end_matches('/'));
    let mut answered = Instant::now();
    let mut is_there = true;
    loop {
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        // Whatever it answers.
        if gateway.get_url(&url, GONE_AFTER).await.is_ok() {
            answered = Instant::now();
        }
        let was_there = std::mem::replace(&mut is_there, answered.elapsed() < GONE_AFTER);
        match (was_there, is_there) {
            (true, false) => {
                log::warn!("peer {peer} is gone: the other routers share its part of the workers");
                gateway.fleet.count_peers(-1);
            }
            (false, true) => {
                log::info!("peer {peer} is there: it has its part of the workers");
                gateway.fleet.count_peers(1);
            }
            _ => {}
        }
        drop(gateway);
        tokio::time::sleep(INTERVAL).await;
    }
}
