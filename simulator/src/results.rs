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

/// Gaps that differ by no more than this share are one pace.
const ONE_PACE: f64 = 0.02;

/// As few of the arrivals as leave the first, the last and the worst gap between two as they are, and tell
/// when the others came: between two that are kept the tokens came at one pace. A stall and the tokens beside
/// it must not become one slow stretch, of which gaps and what stalls them would be read off wrongly.
pub fn thinned(arrivals: &[(f64, u64)]) -> Vec<(f64, u64)> {
    let gaps = arrivals.windows(2).map(|pair| pair[1].0 - pair[0].0);
    let worst_s = gaps.fold(0.0, f64::max);
    let mut kept: Vec<(f64, u64)> = arrivals.first().copied().into_iter().collect();
    // The shortest and the longest gap since the last one that was kept.
    let (mut shortest_s, mut longest_s) = (f64::INFINITY, 0.0_f64);
    for pair in arrivals.windows(2) {
        let gap_s = pair[1].0 - pair[0].0;
        let paced = longest_s.max(gap_s) <= (1.0 + ONE_PACE) * shortest_s.min(gap_s);
        if kept
            .last()
            .is_some_and(|last| last.1 < pair[0].1 && !(paced && pair[1].0 - last.0 <= worst_s))
        {
            kept.push(pair[0]);
            (shortest_s, longest_s) = (gap_s, gap_s);
        } else {
            (shortest_s, longest_s) = (shortest_s.min(gap_s), longest_s.max(gap_s));
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

        #[test]
        fn thinning_tells_when_every_token_came(
            paces in prop::collection::vec((0.001f64..0.05, 1usize..40, 0.0f64..2.0), 1..8),
        ) {
            let mut now_s = 1.0;
            let mut arrivals = vec![(now_s, 1)];
            for (pace_s, tokens, stall_s) in paces {
                for at in 0..tokens {
                    now_s += if at == 0 { pace_s + stall_s } else { pace_s };
                    arrivals.push((rounded(now_s), arrivals.len() as u64 + 1));
                }
            }
            let kept = thinned(&arrivals);
            for pair in kept.windows(2) {
                let tokens = (pair[1].1 - pair[0].1) as f64;
                let pace_s = (pair[1].0 - pair[0].0) / tokens;
                let between = arrivals.iter().filter(|(_, n)| (pair[0].1..=pair[1].1).contains(n));
                for (at_s, n) in between {
                    let told_s = pair[0].0 + (n - pair[0].1) as f64 * pace_s;
                    prop_assert!((at_s - told_s).abs() <= ONE_PACE * pace_s * tokens + 1e-5);
                }
            }
        }

        #[test]
        fn an_even_answer_with_one_stall_is_a_few_arrivals(tokens in 100u64..2_000) {
            let stalls = |n: u64| if n > 50 { 1.5 } else { 0.0 };
            let arrivals: Vec<_> = (0..tokens).map(|n| (rounded(n as f64 * 0.01 + stalls(n)), n + 1)).collect();
            prop_assert!(thinned(&arrivals).len() as u64 <= 5 + tokens / 100);
        }
    }
}
