//! Looks for workers that accept requests and give no sign of life, and wakes the requests on them.

use super::Gateway;
use std::sync::Weak;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_millis(250);
/// Load reports may be late by so many intervals.
const LATE_REPORTS: f64 = 3.0;

pub(super) async fn watch(gateway: Weak<Gateway>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        let after_s = gateway.config.silence_timeout_s;
        let reports_after_s = after_s.max(LATE_REPORTS * gateway.config.load_interval_s);
        if gateway.fleet.find_silent(after_s, reports_after_s) {
            gateway.alarms.send_modify(|alarms| *alarms += 1);
        }
    }
}
