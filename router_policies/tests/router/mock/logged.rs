//! The warnings of all routers under test.

use log::{LevelFilter, Log, Metadata, Record};
use parking_lot::Mutex;

struct Kept(Mutex<Vec<String>>);

static KEPT: Kept = Kept(Mutex::new(Vec::new()));

impl Log for Kept {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        self.0.lock().push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// From now on they are kept.
pub fn begin() {
    // Another test may have begun.
    let _ = log::set_logger(&KEPT);
    log::set_max_level(LevelFilter::Warn);
}

/// Those about this worker.
pub fn lines_of(worker: &str) -> Vec<String> {
    lines_with(&format!("worker {worker}: "))
}

/// Those that begin so.
pub fn lines_with(begin: &str) -> Vec<String> {
    let kept = KEPT.0.lock();
    kept.iter()
        .filter(|line| line.starts_with(begin))
        .cloned()
        .collect()
}
