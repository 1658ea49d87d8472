//! A worker, as `router.toml`, the command line and `POST /workers` describe it.

use super::Role;
use super::address::host_of;
use super::checks::within;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

const FROM_ENVIRONMENT: &str = "env:";
const MAX_ID_BYTES: usize = 128;
const SPEEDS_TOKENS_PER_S: RangeInclusive<f64> = 0.001..=1e9;

/// A host as it stands in a URL: an IPv6 address in brackets.
pub fn bracketed(host: &str) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]"),
        false => host.to_owned(),
    }
}

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

/// What must not stand in logs. A configuration that is written out has it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What `env:NAME` stands for; any other stays.
    ///
    /// # Errors
    /// Names the variable that is not set.
    pub fn of_environment(self) -> Result<Self, String> {
        match self.0.strip_prefix(FROM_ENVIRONMENT) {
            Some(variable) => std::env::var(variable)
                .map(Self)
                .map_err(|_| format!("the variable {variable} is not set")),
            None => Ok(self),
        }
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSpec {
    /// Defaults to the URL's host and port.
    #[serde(default)]
    pub id: String,
    /// `http://host:port`, or `https`.
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
    /// Tokens that a tier in the host's memory holds beside: sessions come back from it without being
    /// computed again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_kv_tokens: Option<u64>,
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
    /// The key that the worker asks for (`--api-key` of SGLang and vLLM), or `env:NAME` in files and flags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paced_prefill_tokens_per_s: Option<f64>,
    /// Whether the engine survives that a request is aborted before it was scheduled. vLLM (0.26.0) with
    /// a tier in the host's memory does not: see `gateway/departure.rs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abort_queued: Option<bool>,
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

pub fn default_true() -> bool {
    true
}

impl WorkerSpec {
    /// `host:port` of the URL.
    pub fn authority(&self) -> &str {
        let rest = self
            .url
            .split_once("://")
            .map_or(&*self.url, |(_, rest)| rest);
        rest.trim_end_matches('/')
    }

    /// The URL's host.
    pub fn host(&self) -> &str {
        let authority = self.authority();
        authority
            .rsplit_once(':')
            .map_or(authority, |(host, _)| host)
    }

    /// Whether a request that waits for its first token there may be aborted.
    pub fn may_abort_queued(&self) -> bool {
        let has_offloading = self.engine == Engine::Vllm && self.host_kv_tokens.is_some();
        self.abort_queued.unwrap_or(!has_offloading)
    }

    /// With the key that `env:NAME` stands for: of a worker that the router's own user names.
    ///
    /// # Errors
    /// One line that names the variable which is not set.
    pub fn with_key_of_environment(mut self) -> Result<Self, String> {
        if let Some(key) = self.api_key.take() {
            let name = if self.id.is_empty() {
                &self.url
            } else {
                &self.id
            };
            let key = key.of_environment();
            self.api_key = Some(key.map_err(|error| format!("worker {name}: api_key: {error}"))?);
        }
        Ok(self)
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
        const URL: &str = "expected http://HOST:PORT or https://HOST:PORT, of one host that is neither link-local \
                           nor a cloud's metadata";
        let Some((scheme @ ("http" | "https"), rest)) = self.url.split_once("://") else {
            return fail("url", URL);
        };
        let authority = rest.trim_end_matches('/');
        let Some(host) = host_of(authority) else {
            return fail("url", URL);
        };
        let prefixed = |error: String| format!("worker {name}: {error}");
        within("page_size", self.page_size, 1..=1 << 20).map_err(prefixed)?;
        for (field, value) in [
            ("kv_capacity_tokens", self.kv_capacity_tokens),
            ("host_kv_tokens", self.host_kv_tokens),
        ] {
            within(field, value.unwrap_or(1), 1..=1 << 40).map_err(prefixed)?;
        }
        within(
            "bootstrap_port",
            self.bootstrap_port.unwrap_or(1),
            1..=u16::MAX,
        )
        .map_err(prefixed)?;
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
            if let Some(value) = value
                && value.strip_prefix("tcp://").and_then(host_of).is_none()
            {
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
            if let Some(value) = value {
                within(field, value, SPEEDS_TOKENS_PER_S).map_err(prefixed)?;
            }
        }
        if let Some(Secret(key)) = &self.api_key {
            if key.starts_with(FROM_ENVIRONMENT) {
                // Whoever may add a worker may have anything sent to it.
                return fail(
                    "api_key",
                    "expected the key itself: env:NAME is read in files and flags only",
                );
            }
            if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return fail("api_key", "expected printable characters without spaces");
            }
        }
        if self.bootstrap_port.is_some() && self.bootstrap_host.is_none() {
            self.bootstrap_host = Some(host.trim_matches(['[', ']']).to_owned());
        }
        if let Some(host) = &self.bootstrap_host
            && host_of(&format!("{}:1", bracketed(host))).is_none()
        {
            // It becomes a part of URLs.
            return fail("bootstrap_host", "expected a host's name or address");
        }
        if self.id.is_empty() {
            self.id = authority.to_owned();
        }
        // It stands in paths, headers and the log.
        let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '?' | '#' | '%');
        if self.id.len() > MAX_ID_BYTES || !self.id.chars().all(is_plain) {
            let id: String = self
                .id
                .chars()
                .take(32)
                .flat_map(char::escape_default)
                .collect();
            return Err(format!(
                "worker {id}: id: expected at most {MAX_ID_BYTES} printable characters without \
                 spaces and / ? # %"
            ));
        }
        self.url = format!("{scheme}://{authority}");
        Ok(self)
    }
}

/// Fields of a worker that `POST /workers` reads; other routers' keys are ignored.
pub const WORKER_FIELDS: [&str; 16] = [
    "id",
    "role",
    "engine",
    "bootstrap_host",
    "bootstrap_port",
    "kv_capacity_tokens",
    "host_kv_tokens",
    "page_size",
    "prefix_cache",
    "kv_connector",
    "kv_events",
    "kv_events_replay",
    "api_key",
    "prefill_tokens_per_s",
    "paced_prefill_tokens_per_s",
    "abort_queued",
];
