//! Result lines and the files of a run's folder.

use crate::cache::Totals;
use crate::engine::Counters;
use crate::plan::Start;
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Prime,
    WarmUp,
    Measure,
    Drain,
}

#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    pub kind: &'static str,
    pub message: String,
}

/// A line of `requests.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct ResultLine<'a> {
    pub request_id: &'a str,
    pub session_id: &'a str,
    pub turn: u32,
    pub input_length: u64,
    pub output_length: u64,
    pub trace_s: f64,
    pub phase: Phase,
    pub play: u32,
    pub scheduled_s: f64,
    pub sent_s: f64,
    pub first_token_s: Option<f64>,
    pub finished_s: f64,
    pub arrivals: &'a [(f64, u64)],
    pub output_tokens: u64,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub best_cached_tokens: u64,
    pub decision_id: Option<&'a str>,
    pub status: Option<u16>,
    pub error: Option<Failure>,
}

/// `phases.json`.
#[derive(Clone, Debug, Serialize)]
pub struct PhasesFile {
    pub start: Start,
    pub window_start_s: f64,
    pub window_end_s: f64,
    pub warm_up_s: f64,
    pub measure_s: f64,
    pub recycle: bool,
    pub max_think_s: Option<f64>,
}

/// One worker's part of [`Report`].
#[derive(Clone, Debug, Serialize)]
pub struct WorkerReport {
    pub id: String,
    #[serde(flatten)]
    pub counters: Counters,
    pub cache_blocks: Totals,
    /// Of requests that run, or that wait for another worker.
    pub used_tokens_now: u64,
    pub cached_tokens_now: u64,
    pub host_tokens_now: u64,
}

/// What a simulated run did; `simulation.json` in its folder.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub simulated: bool,
    pub calibrations: Vec<String>,
    pub seed: u64,
    pub end_s: f64,
    pub requests: u64,
    pub failed: u64,
    pub block_tokens: u64,
    pub workers: Vec<WorkerReport>,
    /// Nothing is reserved on any worker any more.
    pub router_is_idle: bool,
}

/// A file of JSON lines.
pub struct Lines {
    file: BufWriter<File>,
    name: String,
}

impl Lines {
    /// # Errors
    /// One line that names the file.
    pub fn create(path: &Path) -> Result<Self, String> {
        let name = path.display().to_string();
        let file = File::create(path).map_err(|error| format!("{name}: {error}"))?;
        Ok(Self {
            file: BufWriter::new(file),
            name,
        })
    }

    /// # Errors
    /// As [`Lines::create`].
    pub fn write(&mut self, line: &impl Serialize) -> Result<(), String> {
        serde_json::to_writer(&mut self.file, line)
            .map_err(|error| format!("{}: {error}", self.name))?;
        self.file
            .write_all(b"\n")
            .map_err(|error| format!("{}: {error}", self.name))
    }

    /// # Errors
    /// As [`Lines::create`].
    pub fn close(mut self) -> Result<(), String> {
        self.file
            .flush()
            .map_err(|error| format!("{}: {error}", self.name))
    }
}

/// Times are written to the microsecond.
pub fn rounded(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

/// # Errors
/// One line that names the file.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), String> {
    let failed = |error: String| format!("{}: {error}", path.display());
    let mut text =
        serde_json::to_string_pretty(value).map_err(|error| failed(error.to_string()))?;
    text.push('\n');
    std::fs::write(path, text).map_err(|error| failed(error.to_string()))
}

/// As few of the arrivals as leave the first, the last and the worst gap between two as they are.
pub fn thinned(arrivals: &[(f64, u64)]) -> Vec<(f64, u64)> {
    let gaps = arrivals.windows(2).map(|pair| pair[1].0 - pair[0].0);
    let worst_s = gaps.fold(0.0, f64::max);
    let mut kept: Vec<(f64, u64)> = arrivals.first().copied().into_iter().collect();
    for pair in arrivals.windows(2) {
        if kept
            .last()
            .is_some_and(|last| last.1 < pair[0].1 && pair[1].0 - last.0 > worst_s)
        {
            kept.push(pair[0]);
        }
    }
    if let (Some(&last), true) = (arrivals.last(), arrivals.len() > 1) {
        kept.push(last);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn thinning_keeps_the_first_the_last_and_the_worst_gap(
            gaps in prop::collection::vec(0.001f64..3.0, 0..60),
        ) {
            let mut now_s = 1.0;
            let mut arrivals = vec![(now_s, 1)];
            for gap_s in gaps {
                now_s += gap_s;
                arrivals.push((rounded(now_s), arrivals.len() as u64 + 1));
            }
            let worst = |arrivals: &[(f64, u64)]| {
                arrivals.windows(2).map(|pair| pair[1].0 - pair[0].0).fold(0.0, f64::max)
            };
            let kept = thinned(&arrivals);
            prop_assert_eq!(kept.first(), arrivals.first());
            prop_assert_eq!(kept.last(), arrivals.last());
            prop_assert!((worst(&kept) - worst(&arrivals)).abs() < 1e-9);
            prop_assert!(kept.windows(2).all(|pair| pair[0].1 < pair[1].1));
        }
    }
}
