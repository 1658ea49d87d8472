//! The requests of a plan: what `replay` would send, with what each waits for.

use crate::ids::mix;
use serde::Deserialize;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

#[derive(Deserialize)]
struct Line {
    request_id: String,
    session_id: String,
    turn: u32,
    trace_s: f64,
    input_length: u64,
    output_length: u64,
    block_size: u64,
    /// Either ids, or runs `[first, count]` of consecutive ones.
    hash_ids: Vec<Ids>,
    #[serde(default)]
    think_time_s: f64,
    #[serde(default)]
    waits_for: Vec<usize>,
    tree: usize,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(i64),
    Run(i64, u64),
}

/// A request of the trace.
#[derive(Clone, Debug)]
pub struct Planned {
    pub request_id: String,
    /// Number of its session.
    pub session: usize,
    pub turn: u32,
    pub trace_s: f64,
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// Of every started block, mixed.
    pub blocks: Vec<u64>,
    pub think_s: f64,
    pub waits_for: Vec<usize>,
    /// The session's turn after this one.
    pub next: Option<usize>,
}

/// All of them, in the trace's order.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    pub all: Vec<Planned>,
    pub sessions: Vec<String>,
    /// Requests by conversation (a session with its sub-agents), in the trace's order.
    pub trees: Vec<Vec<usize>>,
    /// Who waits for a request.
    pub followers: Vec<Vec<usize>>,
    pub block_tokens: u64,
}

impl Requests {
    /// # Errors
    /// One line that names the file, the line and what is wrong with it.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let file = std::fs::File::open(path).map_err(|error| format!("{shown}: {error}"))?;
        let mut requests = Self::default();
        let mut session_of = HashMap::new();
        let mut last_turn: HashMap<usize, usize> = HashMap::new();
        for (number, text) in BufReader::new(file).lines().enumerate() {
            let failed = |error: String| format!("{shown}:{}: {error}", number + 1);
            let text = text.map_err(|error| failed(error.to_string()))?;
            let line: Line =
                serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
            requests
                .take(line, &mut session_of, &mut last_turn)
                .map_err(failed)?;
        }
        if requests.all.is_empty() {
            return Err(format!("{shown}: expected at least one request"));
        }
        Ok(requests)
    }

    fn take(
        &mut self,
        line: Line,
        session_of: &mut HashMap<String, usize>,
        last_turn: &mut HashMap<usize, usize>,
    ) -> Result<(), String> {
        let index = self.all.len();
        let blocks: Vec<u64> = line
            .hash_ids
            .iter()
            .flat_map(|ids| match *ids {
                Ids::One(id) => id..id + 1,
                Ids::Run(first, count) => first..first.saturating_add_unsigned(count),
            })
            .map(|id| mix(id as u64, 0))
            .collect();
        if line.block_size == 0 || line.input_length == 0 || line.output_length == 0 {
            return Err("expected block_size, input_length and output_length of 1 or more".into());
        }
        if blocks.len() as u64 != line.input_length.div_ceil(line.block_size) {
            let expected = line.input_length.div_ceil(line.block_size);
            return Err(format!(
                "field hash_ids: expected {expected}, found {}",
                blocks.len()
            ));
        }
        if index == 0 {
            self.block_tokens = line.block_size;
        } else if self.block_tokens != line.block_size {
            return Err(format!(
                "field block_size: expected {} as before, found {}",
                self.block_tokens, line.block_size
            ));
        }
        if let Some(&awaited) = line.waits_for.iter().find(|&&awaited| awaited >= index) {
            return Err(format!(
                "field waits_for: expected a request before this one, found number {awaited}"
            ));
        }
        if line.tree > self.trees.len() {
            return Err(format!(
                "field tree: expected at most {}, found {}",
                self.trees.len(),
                line.tree
            ));
        }
        let next_session = self.sessions.len();
        let session = *session_of
            .entry(line.session_id.clone())
            .or_insert(next_session);
        if session == next_session {
            self.sessions.push(line.session_id);
        }
        if line.tree == self.trees.len() {
            self.trees.push(Vec::new());
        }
        self.trees[line.tree].push(index);
        self.followers.push(Vec::new());
        for &awaited in &line.waits_for {
            self.followers[awaited].push(index);
        }
        if let Some(previous) = last_turn.insert(session, index) {
            self.all[previous].next = Some(index);
        }
        self.all.push(Planned {
            request_id: line.request_id,
            session,
            turn: line.turn,
            trace_s: line.trace_s,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            blocks,
            think_s: line.think_time_s,
            waits_for: line.waits_for,
            next: None,
        });
        Ok(())
    }

    /// Full blocks of a request's prompt.
    pub fn full_blocks(&self, index: usize) -> usize {
        (self.all[index].input_tokens / self.block_tokens) as usize
    }

    /// Where the session's next prompt goes on where this one and its answer end, and that prompt: not
    /// so where the agent has compacted its context.
    pub fn continued_by(&self, index: usize) -> Option<&Planned> {
        let request = &self.all[index];
        let next = &self.all[request.next?];
        let full = self.full_blocks(index);
        let goes_on = next.input_tokens >= request.input_tokens + request.output_tokens
            && next.blocks[..full] == request.blocks[..full];
        goes_on.then_some(next)
    }
}
