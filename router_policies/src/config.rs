//! The router's configuration: what `router.toml` and the command line may say, and nothing else.

use crate::policy::Role;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// What a worker speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    Sglang,
    Vllm,
}

/// How vLLM workers exchange KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Connector {
    Nixl,
    Mooncake,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSpec {
    /// Defaults to the URL's host and port.
    #[serde(default)]
    pub id: String,
    /// `http://host:port`.
    pub url: String,
    #[serde(default = "default_role")]
    pub role: Role,
    #[serde(default = "default_engine")]
    pub engine: Engine,
    /// SGLang prefill workers: where decode workers find it; defaults to the URL's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Bounds the prefix estimate and the room that policies see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_capacity_tokens: Option<u64>,
    /// Tokens a KV page.
    #[serde(default = "default_page_size")]
    pub page_size: usize,
    /// Whether finished prompts stay in the worker's cache.
    #[serde(default = "default_true")]
    pub prefix_cache: bool,
    /// vLLM workers with a KV connector; a colocated one (`kv_both`) then also prefills and decodes
    /// for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_connector: Option<Connector>,
    /// Where the worker publishes KV events, `tcp://host:port`: the prefix is then known exactly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events: Option<String>,
    /// Where the worker replays missed KV events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_events_replay: Option<String>,
    /// What to assume of the worker until it has been seen: new prompt tokens prefilled a second
    /// alone (attention to a long context comes on top), and while others decode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paced_prefill_tokens_per_s: Option<f64>,
}

fn default_role() -> Role {
    Role::Colocated
}

fn default_engine() -> Engine {
    Engine::Sglang
}

fn default_page_size() -> usize {
    1
}

fn default_true() -> bool {
    true
}

impl WorkerSpec {
    /// `host:port` of the URL.
    pub fn authority(&self) -> &str {
        self.url.trim_start_matches("http://").trim_end_matches('/')
    }

    /// Fills in what follows from other fields, and checks the rest.
    ///
    /// # Errors
    /// One line that names the field and what was expected.
    pub fn normalise(mut self) -> Result<Self, String> {
        let name = if self.id.is_empty() {
            &self.url
        } else {
            &self.id
        };
        let fail = |field: &str, expected: &str| Err(format!("worker {name}: {field}: {expected}"));
        let Some(rest) = self.url.strip_prefix("http://") else {
            return fail("url", "expected http://HOST:PORT");
        };
        let authority = rest.trim_end_matches('/');
        let host = match authority.parse::<hyper::http::uri::Authority>() {
            Ok(parsed) if parsed.port().is_some() => parsed.host().to_owned(),
            _ => return fail("url", "expected http://HOST:PORT"),
        };
        if self.page_size == 0 {
            return fail("page_size", "expected at least 1 token");
        }
        if self.role == Role::Prefill
            && self.engine == Engine::Sglang
            && self.bootstrap_port.is_none()
        {
            return fail(
                "bootstrap_port",
                "a prefill worker of SGLang needs one (its --disaggregation-bootstrap-port)",
            );
        }
        let separates = self.role != Role::Colocated;
        if self.engine == Engine::Vllm && separates && self.kv_connector.is_none() {
            return fail(
                "kv_connector",
                "a vLLM worker of this role needs nixl or mooncake",
            );
        }
        if self.kv_connector == Some(Connector::Mooncake) && self.bootstrap_port.is_none() {
            return fail(
                "bootstrap_port",
                "a vLLM worker with Mooncake needs one (its VLLM_MOONCAKE_BOOTSTRAP_PORT)",
            );
        }
        for (field, value) in [
            ("kv_events", &self.kv_events),
            ("kv_events_replay", &self.kv_events_replay),
        ] {
            if value.as_ref().is_some_and(|v| !v.starts_with("tcp://")) {
                return fail(field, "expected tcp://HOST:PORT");
            }
        }
        for (field, value) in [
            ("prefill_tokens_per_s", self.prefill_tokens_per_s),
            (
                "paced_prefill_tokens_per_s",
                self.paced_prefill_tokens_per_s,
            ),
        ] {
            if value.is_some_and(|v| !(v.is_finite() && v > 0.0)) {
                return fail(field, "expected a positive number");
            }
        }
        if self.bootstrap_port.is_some() && self.bootstrap_host.is_none() {
            self.bootstrap_host = Some(host.trim_matches(['[', ']']).to_owned());
        }
        if self.id.is_empty() {
            self.id = authority.to_owned();
        }
        self.url = format!("http://{authority}");
        Ok(self)
    }
}

/// Fields of a worker that `POST /workers` reads; other routers' keys are ignored.
pub const WORKER_FIELDS: [&str; 13] = [
    "id",
    "role",
    "engine",
    "bootstrap_host",
    "bootstrap_port",
    "kv_capacity_tokens",
    "page_size",
    "prefix_cache",
    "kv_connector",
    "kv_events",
    "kv_events_replay",
    "prefill_tokens_per_s",
    "paced_prefill_tokens_per_s",
];

/// The whole configuration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    #[serde(default = "default_host")]
    pub host: String,
    /// 0 takes a free port.
    #[serde(default = "default_port")]
    pub port: u16,
    #[serde(default = "default_policy")]
    pub policy: String,
    #[serde(default)]
    pub policy_params: serde_json::Value,
    #[serde(default)]
    pub decision_log: Option<PathBuf>,
    /// A `tokenizer.json`, or a folder with one: text prompts are then compared by their tokens.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    #[serde(default)]
    pub workers: Vec<WorkerSpec>,
    /// Threads that serve requests.
    #[serde(default = "default_threads")]
    pub threads: usize,
    /// Larger request bodies are refused with 413.
    #[serde(default = "default_max_body_bytes")]
    pub max_body_bytes: usize,
    /// From dispatch to the end of the answer.
    #[serde(default = "default_request_timeout_s")]
    pub request_timeout_s: f64,
    #[serde(default = "default_connect_timeout_s")]
    pub connect_timeout_s: f64,
    /// Attempts on other workers after a failure before the first token.
    #[serde(default = "default_retries")]
    pub retries: usize,
    #[serde(default = "default_health_interval_s")]
    pub health_interval_s: f64,
    /// Time between load reports asked of each worker; 0 asks for none.
    #[serde(default = "default_load_interval_s")]
    pub load_interval_s: f64,
    /// Requests served at once; more wait.
    #[serde(default = "default_max_inflight")]
    pub max_inflight: usize,
    /// Requests that may wait; more are refused with 429.
    #[serde(default = "default_max_queued")]
    pub max_queued: usize,
    /// A request that waited this long is refused with 503.
    #[serde(default = "default_queue_timeout_s")]
    pub queue_timeout_s: f64,
    /// Needed to change the workers, as `Authorization: Bearer`; without one, only a router that
    /// listens on a loopback address lets its workers be changed.
    #[serde(default)]
    pub admin_token: Option<String>,
    /// On shutdown, running requests have this long to end.
    #[serde(default = "default_drain_timeout_s")]
    pub drain_timeout_s: f64,
}

fn default_host() -> String {
    "127.0.0.1".to_owned()
}

fn default_port() -> u16 {
    8000
}

fn default_policy() -> String {
    "unified".to_owned()
}

fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(4))
}

fn default_max_body_bytes() -> usize {
    64 << 20
}

fn default_request_timeout_s() -> f64 {
    1800.0
}

fn default_connect_timeout_s() -> f64 {
    5.0
}

fn default_retries() -> usize {
    2
}

fn default_health_interval_s() -> f64 {
    2.0
}

fn default_load_interval_s() -> f64 {
    1.0
}

fn default_max_inflight() -> usize {
    4096
}

fn default_max_queued() -> usize {
    1024
}

fn default_queue_timeout_s() -> f64 {
    60.0
}

fn default_drain_timeout_s() -> f64 {
    30.0
}

impl Default for Config {
    fn default() -> Self {
        Self {
            host: default_host(),
            port: default_port(),
            policy: default_policy(),
            policy_params: serde_json::Value::Null,
            decision_log: None,
            tokenizer: None,
            workers: Vec::new(),
            threads: default_threads(),
            max_body_bytes: default_max_body_bytes(),
            request_timeout_s: default_request_timeout_s(),
            connect_timeout_s: default_connect_timeout_s(),
            retries: default_retries(),
            health_interval_s: default_health_interval_s(),
            load_interval_s: default_load_interval_s(),
            max_inflight: default_max_inflight(),
            max_queued: default_max_queued(),
            queue_timeout_s: default_queue_timeout_s(),
            admin_token: None,
            drain_timeout_s: default_drain_timeout_s(),
        }
    }
}

impl Config {
    /// Reads a TOML file; relative paths in it are relative to it.
    ///
    /// # Errors
    /// One line that names the file, the line and what was expected.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
        let mut config: Self = toml::from_str(&text).map_err(|error| {
            let line = error
                .span()
                .map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            let message = error.message().replace('\n', " ");
            format!("{shown}:{line}: {message}")
        })?;
        if let Some(folder) = path.parent() {
            for named in [&mut config.decision_log, &mut config.tokenizer] {
                *named = named.take().map(|path| folder.join(path));
            }
        }
        Ok(config)
    }

    /// Checks every field and fills in what follows from others.
    ///
    /// # Errors
    /// One line that names the field and what was expected.
    pub fn normalise(mut self) -> Result<Self, String> {
        self.workers = self
            .workers
            .into_iter()
            .map(WorkerSpec::normalise)
            .collect::<Result<_, _>>()?;
        let mut ids = HashSet::new();
        if let Some(worker) = self.workers.iter().find(|w| !ids.insert(&w.id)) {
            return Err(format!("worker {}: id: given twice", worker.id));
        }
        for (field, value) in [
            ("request_timeout_s", self.request_timeout_s),
            ("connect_timeout_s", self.connect_timeout_s),
            ("health_interval_s", self.health_interval_s),
            ("queue_timeout_s", self.queue_timeout_s),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(format!("{field}: expected a positive number, not {value}"));
            }
        }
        for (field, value) in [
            ("threads", self.threads),
            ("max_inflight", self.max_inflight),
        ] {
            if value == 0 {
                return Err(format!("{field}: expected at least 1"));
            }
        }
        if !(self.load_interval_s.is_finite() && self.load_interval_s >= 0.0) {
            return Err("load_interval_s: expected 0 or a positive number".to_owned());
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let folder = std::env::temp_dir().join(format!("router-config-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
        let path = folder.join("router.toml");
        std::fs::write(&path, text).map_err(|e| e.to_string())?;
        let parsed = Config::from_file(&path).and_then(Config::normalise);
        std::fs::remove_dir_all(&folder).map_err(|e| e.to_string())?;
        parsed
    }

    #[test]
    fn a_worker_gets_its_id_and_bootstrap_host_from_its_url() {
        let config = parse(
            "[[workers]]\nurl = \"http://127.0.0.1:30000/\"\nrole = \"prefill\"\nbootstrap_port = 8998\n",
        )
        .expect("valid");
        assert_eq!(config.workers[0].id, "127.0.0.1:30000");
        assert_eq!(
            config.workers[0].bootstrap_host.as_deref(),
            Some("127.0.0.1")
        );
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let config = parse("decision_log = \"log.jsonl\"\ntokenizer = \"model\"\n").expect("valid");
        let (log, tokenizer) = (config.decision_log, config.tokenizer);
        let folder = log.as_deref().and_then(Path::parent).expect("a folder");
        assert!(folder.is_absolute());
        assert_eq!(tokenizer, Some(folder.join("model")));
    }

    #[test]
    fn an_error_names_the_file_the_line_and_the_key() {
        let error = parse("port = 8000\npolcy = \"pd\"\n").expect_err("unknown key");
        assert!(
            error.contains("router.toml:2:") && error.contains("polcy"),
            "{error}"
        );
    }

    #[test]
    fn wrong_values_are_named() {
        for (text, expected) in [
            (
                "[[workers]]\nurl = \"ftp://a:1\"",
                "expected http://HOST:PORT",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nrole = \"prefill\"",
                "bootstrap_port",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\n[[workers]]\nurl = \"http://a:1\"",
                "given twice",
            ),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected), "{error}");
        }
    }
}
