//! Result lines and the files of a run's folder.

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
