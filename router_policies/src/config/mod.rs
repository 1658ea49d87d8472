//! The router's configuration: what `router.toml` and the command line may say, and nothing else.

mod kubernetes;

use decision::fleet::admission::{Priority, Tenant};
use decision::model::address::{canonical, host_of};
use decision::model::checks::{described, plainly, read, within};
use decision::model::worker::default_true;
pub use decision::model::{Connector, Engine, Secret, WORKER_FIELDS, WorkerSpec};
pub use kubernetes::{Kubernetes, PREFIX};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// Times beyond this are a mistake, or meant for ever.
const MAX_S: f64 = 7.0 * 86_400.0;
/// Shorter ones would keep a processor busy.
const MIN_S: f64 = 0.001;

/// Where gateways ask where requests go: see `gateway::picker`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Picker {
    #[serde(default = "default_host")]
    pub host: String,
    /// 0 takes a free port.
    pub port: u16,
    /// A request that waits for room longer than this is refused with 429. Where a gateway waits for messages, it
    /// must wait longer.
    #[serde(default = "default_patience_s")]
    pub patience_s: f64,
}

fn default_patience_s() -> f64 {
    60.0
}

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
    /// The rule of admission, and its parameters: see `deltaserve policy explain admission`.
    #[serde(default)]
    #[serde(alias = "residency")]
    pub admission: serde_json::Value,
    #[serde(default)]
    pub decision_log: Option<PathBuf>,
    /// What is kept of the decision log, in MB of 10^6 bytes; 0 keeps all of it.
    #[serde(default)]
    pub decision_log_max_mb: f64,
    /// A trace of what goes by, for replay, and what is kept of it, in MB of 10^6 bytes.
    #[serde(default)]
    pub record: Option<PathBuf>,
    #[serde(default = "default_record_max_mb")]
    pub record_max_mb: f64,
    /// A `tokenizer.json`, or a folder with one: text prompts are then compared by their tokens.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    #[serde(default)]
    pub workers: Vec<WorkerSpec>,
    /// Names that clients may ask for, in which `*` stands for any text, and the models that they stand for.
    #[serde(default)]
    pub models: BTreeMap<String, String>,
    /// Who shares the workers, and how. Requests that belong to none are those of `default`.
    #[serde(default)]
    pub tenants: BTreeMap<String, TenantConfig>,
    /// The header in which a gateway that is trusted names the tenant.
    #[serde(default)]
    pub tenant_header: Option<String>,
    /// Other routers before the same workers.
    #[serde(default)]
    pub peers: Vec<String>,
    #[serde(default)]
    pub picker: Option<Picker>,
    #[serde(default)]
    pub kubernetes: Option<Kubernetes>,
    /// Threads that serve requests.
    #[serde(default = "default_threads")]
    pub threads: usize,
    /// Larger request bodies are refused with 413.
    #[serde(default = "default_max_body_bytes")]
    pub max_body_bytes: usize,
    /// From a request's headers to the end of its answer, whatever the client does.
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
    /// A worker that owes first tokens, or has reported its load so far, and gives no sign of life for so
    /// long is suspected to hang.
    #[serde(default = "default_silence_timeout_s")]
    pub silence_timeout_s: f64,
    /// Bytes of request bodies held at once, before and while they have no answer; more are refused
    /// with 503.
    #[serde(default = "default_max_held_bytes")]
    pub max_held_bytes: usize,
    /// A request whose body does not come on for so long is refused with 408.
    #[serde(default = "default_body_timeout_s")]
    pub body_timeout_s: f64,
    /// Whether what clients say of where KV comes from and goes to is taken out of their requests:
    /// `bootstrap_*` and `kv_transfer_params` in bodies, `x-override-*` in headers.
    #[serde(default = "default_true")]
    pub strip_transfer_keys: bool,
    /// Whether what changes from session to session in front of what is the same is left out of prompts.
    #[serde(default = "default_true")]
    pub normalise_prompts: bool,
    /// The model's vocabulary: larger token ids are refused. Where it is absent, it is read from the
    /// model's folder if SGLang names one that is on this machine.
    #[serde(default)]
    pub vocab_size: Option<u64>,
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
    /// A file with the keys of clients, one a line; the variable `DELTASERVE_API_KEYS` has more. With
    /// any, requests need one.
    #[serde(default)]
    pub api_keys_file: Option<PathBuf>,
    /// The router's certificate and those up to an authority that clients know (PEM), and its private
    /// key: clients then speak TLS. One needs the other.
    #[serde(default)]
    pub tls_cert_file: Option<PathBuf>,
    #[serde(default)]
    pub tls_key_file: Option<PathBuf>,
    /// The authorities (PEM) of the certificates of workers whose URL is `https`; without it those that
    /// this machine trusts.
    #[serde(default)]
    pub worker_ca_file: Option<PathBuf>,
    /// The address of a collector of OpenTelemetry's traces (OTLP over HTTP); without it there are none.
    #[serde(default)]
    pub otlp_endpoint: Option<String>,
    /// The share of requests that are traced, of those whose client does not say.
    #[serde(default = "default_otlp_sample_ratio")]
    pub otlp_sample_ratio: f64,
    /// On shutdown, running requests have this long to end.
    #[serde(default = "default_drain_timeout_s")]
    pub drain_timeout_s: f64,
}

/// One of those that share the workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Its API keys, or `env:NAME`.
    #[serde(default)]
    pub keys: Vec<Secret>,
    #[serde(default = "default_weight")]
    pub weight: f64,
    #[serde(default)]
    pub priority: Priority,
    #[serde(default)]
    pub max_sessions: Option<usize>,
    #[serde(default)]
    pub tokens_per_min: Option<f64>,
}

/// Of those that belong to no other.
const NO_TENANT: &str = "default";
/// Each has lines of its own in the metrics.
const MAX_TENANTS: usize = 256;

fn default_weight() -> f64 {
    1.0
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

fn default_record_max_mb() -> f64 {
    1000.0
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

fn default_silence_timeout_s() -> f64 {
    5.0
}

fn default_max_held_bytes() -> usize {
    1 << 30
}

fn default_body_timeout_s() -> f64 {
    30.0
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

fn default_otlp_sample_ratio() -> f64 {
    1.0
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
            admission: serde_json::Value::Null,
            decision_log: None,
            decision_log_max_mb: 0.0,
            record: None,
            record_max_mb: default_record_max_mb(),
            tokenizer: None,
            workers: Vec::new(),
            models: BTreeMap::new(),
            tenants: BTreeMap::new(),
            tenant_header: None,
            peers: Vec::new(),
            picker: None,
            kubernetes: None,
            threads: default_threads(),
            max_body_bytes: default_max_body_bytes(),
            request_timeout_s: default_request_timeout_s(),
            connect_timeout_s: default_connect_timeout_s(),
            retries: default_retries(),
            health_interval_s: default_health_interval_s(),
            load_interval_s: default_load_interval_s(),
            silence_timeout_s: default_silence_timeout_s(),
            max_held_bytes: default_max_held_bytes(),
            body_timeout_s: default_body_timeout_s(),
            normalise_prompts: true,
            strip_transfer_keys: true,
            vocab_size: None,
            max_inflight: default_max_inflight(),
            max_queued: default_max_queued(),
            queue_timeout_s: default_queue_timeout_s(),
            admin_token: None,
            api_keys_file: None,
            tls_cert_file: None,
            tls_key_file: None,
            worker_ca_file: None,
            otlp_endpoint: None,
            otlp_sample_ratio: default_otlp_sample_ratio(),
            drain_timeout_s: default_drain_timeout_s(),
        }
    }
}

impl Config {
    /// What is kept of the decision log; none where all of it is.
    pub fn decision_log_max_bytes(&self) -> Option<u64> {
        (self.decision_log_max_mb > 0.0).then_some((self.decision_log_max_mb * 1e6) as u64)
    }

    /// Names of the tenants; the first is that of requests which belong to none.
    pub fn tenant_names(&self) -> Vec<&str> {
        let others = self.tenants.keys().map(String::as_str);
        let others = others.filter(|name| *name != NO_TENANT);
        std::iter::once(NO_TENANT).chain(others).collect()
    }

    /// The tenants in that order; none where the configuration names none.
    pub fn tenant_list(&self) -> Vec<Tenant> {
        if self.tenants.is_empty() {
            return Vec::new();
        }
        let tenant = |name: &str| {
            let of = self.tenants.get(name);
            Tenant {
                name: name.to_owned(),
                weight: of.map_or(1.0, |of| of.weight),
                priority: of.map(|of| of.priority).unwrap_or_default(),
                max_sessions: of.and_then(|of| of.max_sessions),
                tokens_per_min: of.and_then(|of| of.tokens_per_min),
            }
        };
        self.tenant_names().into_iter().map(tenant).collect()
    }

    fn check_tenants(&mut self) -> Result<(), String> {
        within("tenants", self.tenants.len(), 0..=MAX_TENANTS)?;
        let mut all = HashSet::new();
        for (name, of) in &mut self.tenants {
            let field = |field: &str| format!("tenants.{name}.{field}");
            if name.is_empty() || name.len() > 64 || name.contains(char::is_control) {
                return Err(format!("tenants: {name:?}: expected a name"));
            }
            within(&field("weight"), of.weight, 1e-3..=1e3)?;
            within(
                &field("max_sessions"),
                of.max_sessions.unwrap_or(1),
                1..=1 << 20,
            )?;
            within(
                &field("tokens_per_min"),
                of.tokens_per_min.unwrap_or(1.0),
                1.0..=1e12,
            )?;
            for key in &mut of.keys {
                *key = key
                    .clone()
                    .of_environment()
                    .map_err(|error| format!("{}: {error}", field("keys")))?;
                let text = key.as_str();
                let is_key = (8..=512).contains(&text.len())
                    && text.bytes().all(|byte| byte.is_ascii_graphic());
                if !is_key || !all.insert(text.to_owned()) {
                    let expected =
                        "expected keys of 8 to 512 characters without white space, each once";
                    return Err(format!("{}: {expected}", field("keys")));
                }
            }
        }
        let header = self.tenant_header.as_deref();
        if header.is_some_and(|name| name.parse::<hyper::header::HeaderName>().is_err()) {
            return Err("tenant_header: expected the name of a header".to_owned());
        }
        Ok(())
    }

    /// Reads a TOML file; relative paths in it are relative to it.
    ///
    /// # Errors
    /// One line that names the file, the line and what was expected.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
        let mut config = Self::from_toml(&text).map_err(|(line, message)| match line {
            Some(line) => format!("{shown}:{line}: {message}"),
            None => format!("{shown}: {message}"),
        })?;
        let checked = config.clone().normalise();
        checked.map_err(|error| format!("{shown}: {error}"))?;
        if let Some(folder) = path.parent() {
            for named in [
                &mut config.decision_log,
                &mut config.record,
                &mut config.tokenizer,
                &mut config.api_keys_file,
                &mut config.tls_cert_file,
                &mut config.tls_key_file,
                &mut config.worker_ca_file,
            ] {
                *named = named.take().map(|path| folder.join(path));
            }
            if let Some(of) = &mut config.kubernetes {
                of.kubeconfig = of.kubeconfig.take().map(|path| folder.join(path));
            }
        }
        Ok(config)
    }

    /// Reads TOML; an error comes with its line.
    fn from_toml(text: &str) -> Result<Self, (Option<usize>, String)> {
        let line = |error: &toml::de::Error| {
            let begin = error.span()?.start;
            Some(1 + text.get(..begin)?.matches('\n').count())
        };
        let table = toml::Deserializer::parse(text)
            .map_err(|error| (line(&error), plainly(error.message())))?;
        serde_path_to_error::deserialize(table).map_err(|error| {
            let message = described(error.path(), error.inner().message());
            (line(error.inner()), message)
        })
    }

    /// Reads JSON.
    ///
    /// # Errors
    /// One line that names the field and what was expected.
    pub fn from_json(text: &str) -> Result<Self, String> {
        // Errors of a tree that has been read have no place in a text that no person wrote.
        let tree: serde_json::Value =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        read(tree.clone()).map_err(|error| {
            // People know a worker by its name, not by its place in the list.
            let named = || {
                let (index, rest) = error.strip_prefix("workers[")?.split_once(']')?;
                let worker = tree.get("workers")?.get(index.parse::<usize>().ok()?)?;
                let name = worker.get("id").or(worker.get("url"))?.as_str()?;
                Some(format!(
                    "worker {name}: {}",
                    rest.trim_start_matches(['.', ':', ' '])
                ))
            };
            named().unwrap_or(error)
        })
    }

    /// Checks every field and fills in what follows from others.
    ///
    /// # Errors
    /// One line that names the field and what was expected.
    pub fn normalise(mut self) -> Result<Self, String> {
        self.workers = self
            .workers
            .into_iter()
            .map(|worker| worker.with_key_of_environment()?.normalise())
            .collect::<Result<_, _>>()?;
        decision::fleet::admission::settings::build(&self.admission)?;
        self.check_tenants()?;
        let mut ids = HashSet::new();
        if let Some(worker) = self.workers.iter().find(|w| !ids.insert(&w.id)) {
            return Err(format!("worker {}: id: given twice", worker.id));
        }
        let is_name = |text: &str| !text.is_empty() && !text.contains(char::is_control);
        let named = self.models.iter();
        if let Some((name, _)) = named.clone().find(|(a, b)| !is_name(a) || !is_name(b)) {
            return Err(format!(
                "models: {name:?}: expected a name and a model's name"
            ));
        }
        if let Some((name, model)) = named.clone().find(|(_, model)| model.contains('*')) {
            return Err(format!(
                "models: {name:?}: {model:?}: expected a model's name, without *"
            ));
        }
        if self.tls_cert_file.is_some() != self.tls_key_file.is_some() {
            return Err("tls_cert_file, tls_key_file: one needs the other".to_owned());
        }
        if let Some(variable) = self
            .admin_token
            .as_deref()
            .and_then(|it| it.strip_prefix("env:"))
        {
            let token = std::env::var(variable);
            let missing = |_| format!("admin_token: the variable {variable} is not set");
            self.admin_token = Some(token.map_err(missing)?);
        }
        if let Some(token) = &self.admin_token
            && (token.is_empty() || token.trim() != token || token.contains(char::is_control))
        {
            // No request could have it, and nobody could change the workers.
            let expected = "expected text without white space at its ends and control characters";
            return Err(format!("admin_token: {expected}"));
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            let uri: Option<hyper::Uri> = endpoint.parse().ok();
            let uri = uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
            if uri.is_none_or(|uri| uri.host().is_none() || uri.query().is_some()) {
                let expected =
                    "expected http://HOST:PORT or https://HOST:PORT, with a path if it has one";
                return Err(format!("otlp_endpoint: {expected}"));
            }
        }
        let mut peers = HashSet::new();
        for peer in &self.peers {
            let place = peer
                .split_once("://")
                .filter(|(scheme, _)| matches!(*scheme, "http" | "https"));
            let place = place
                .map(|(_, place)| place)
                .filter(|place| host_of(place).is_some());
            let Some(place) = place else {
                return Err(format!(
                    "peers: {peer:?}: expected http://HOST:PORT or https://HOST:PORT"
                ));
            };
            if !peers.insert(canonical(place)) {
                return Err(format!("peers: {peer:?}: given twice"));
            }
        }
        if let Some(worker) = self
            .workers
            .iter()
            .find(|w| peers.contains(&canonical(w.authority())))
        {
            return Err(format!("worker {}: url: it is that of a peer", worker.id));
        }
        if let Some(picker) = &self.picker {
            within("picker.patience_s", picker.patience_s, MIN_S..=MAX_S)?;
        }
        if let Some(kubernetes) = &mut self.kubernetes {
            kubernetes.normalise()?;
        }
        within("otlp_sample_ratio", self.otlp_sample_ratio, 0.0..=1.0)?;
        within("vocab_size", self.vocab_size.unwrap_or(1), 1..=1 << 32)?;
        for (field, value, least_s) in [
            ("request_timeout_s", self.request_timeout_s, MIN_S),
            ("connect_timeout_s", self.connect_timeout_s, MIN_S),
            ("health_interval_s", self.health_interval_s, MIN_S),
            ("queue_timeout_s", self.queue_timeout_s, MIN_S),
            ("silence_timeout_s", self.silence_timeout_s, MIN_S),
            ("body_timeout_s", self.body_timeout_s, MIN_S),
            ("drain_timeout_s", self.drain_timeout_s, 0.0),
        ] {
            within(field, value, least_s..=MAX_S)?;
        }
        if self.decision_log_max_mb != 0.0 {
            within("decision_log_max_mb", self.decision_log_max_mb, 1.0..=1e9)
                .map_err(|error| format!("{error}; 0 keeps all"))?;
        }
        within("record_max_mb", self.record_max_mb, 1.0..=1e9)?;
        if self.load_interval_s != 0.0 {
            within("load_interval_s", self.load_interval_s, MIN_S..=MAX_S)
                .map_err(|error| format!("{error}; 0 asks for none"))?;
        }
        for (field, value, range) in [
            ("threads", self.threads, 1..=1024),
            ("max_body_bytes", self.max_body_bytes, 1..=1 << 32),
            ("max_held_bytes", self.max_held_bytes, 1..=1 << 40),
            ("retries", self.retries, 0..=1000),
            ("max_inflight", self.max_inflight, 1..=1_000_000),
            ("max_queued", self.max_queued, 0..=1_000_000),
        ] {
            within(field, value, range)?;
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
    fn a_workers_key_is_passed_on_with_the_configuration_and_not_shown() {
        let config =
            parse("[[workers]]\nurl = \"http://a:1\"\napi_key = \"a-key\"\n").expect("valid");
        assert!(!format!("{config:?}").contains("a-key"));
        // As the command line does.
        let text = serde_json::to_string(&config).expect("JSON");
        let again = Config::from_json(&text).expect("valid");
        let key = again.workers[0].api_key.as_ref().expect("a key");
        assert_eq!(key.as_str(), "a-key");
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
                "decision_log_max_mb = 0.5",
                "decision_log_max_mb: expected a number from 1 to 1000000000, not 0.5; 0 keeps all",
            ),
            (
                "[[workers]]\nurl = \"ftp://a:1\"",
                "expected http://HOST:PORT or https://HOST:PORT",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nrole = \"prefill\"",
                "bootstrap_port",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\n[[workers]]\nurl = \"http://a:1\"",
                "given twice",
            ),
            (
                "[[workers]]\nurl = \"http://a:99999\"",
                "url: expected http://HOST:PORT or https://HOST:PORT",
            ),
            ("[[workers]]\nurl = 7", "router.toml:2: workers[0].url: "),
            (
                "[[workers]]\nurl = \"http://a:1\"\nrole = \"cook\"",
                "router.toml:3: workers[0].role: unknown variant `cook`",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nbootstrap_port = 99999",
                "bootstrap_port: invalid value: integer `99999`, expected a whole number from 0 to 65535",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nbootstrap_port = 0",
                "worker http://a:1: bootstrap_port: expected a number from 1 to 65535, not 0",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nbootstrap_host = \"b/x?\"",
                "bootstrap_host: expected a host's name",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\napi_key = \"env:NOT_SET_ANYWHERE\"",
                "api_key: the variable NOT_SET_ANYWHERE is not set",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nkv_events = \"tcp://foo\"",
                "kv_events: expected tcp://HOST:PORT",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nkv_events_replay = \"tcp://*:5557\"",
                "kv_events_replay: expected tcp://HOST:PORT",
            ),
            (
                "[[workers]]\nurl = \"http://a:1\"\nprefill_tokens_per_s = nan",
                "prefill_tokens_per_s: expected a number from 0.001",
            ),
            ("port = 99999", "router.toml:1: port: invalid value"),
            (
                "otlp_endpoint = \"collector:4318\"",
                "otlp_endpoint: expected http://HOST:PORT",
            ),
            (
                "otlp_endpoint = \"http://\"",
                "otlp_endpoint: expected http://HOST:PORT",
            ),
            (
                "otlp_sample_ratio = 1.5",
                "otlp_sample_ratio: expected a number from 0 to 1",
            ),
            ("drain_timeout_s = nan", "drain_timeout_s: expected"),
            ("drain_timeout_s = -1.0", "drain_timeout_s: expected"),
            ("load_interval_s = 1e300", "load_interval_s: expected"),
            ("health_interval_s = 1e-300", "health_interval_s: expected"),
            ("request_timeout_s = inf", "request_timeout_s: expected"),
            ("connect_timeout_s = 0.0", "connect_timeout_s: expected"),
            (
                "queue_timeout_s = \"long\"",
                "queue_timeout_s: invalid type",
            ),
            (
                "threads = 100000",
                "threads: expected a number from 1 to 1024, not 100000",
            ),
            ("threads = -1", "threads: invalid value"),
            ("max_inflight = 0", "max_inflight: expected"),
            ("max_queued = 10000000", "max_queued: expected"),
            ("max_body_bytes = 0", "max_body_bytes: expected"),
            ("retries = 100000", "retries: expected"),
            (
                "peers = [\"10.0.0.2:9000\"]",
                "peers: \"10.0.0.2:9000\": expected http://HOST:PORT",
            ),
            (
                "peers = [\"http://localhost:1\", \"http://127.0.0.1:1\"]",
                "given twice",
            ),
            (
                "peers = [\"http://a:1\"]\n[[workers]]\nurl = \"http://a:1\"",
                "it is that of a peer",
            ),
            ("admin_token = \"\"", "admin_token: expected"),
            (
                "admin_token = \"env:NOT_SET_AT_ALL\"",
                "admin_token: the variable NOT_SET_AT_ALL is not set",
            ),
            ("admin_token = \"secret \"", "admin_token: expected"),
            ("[admission]\nfill = nan", "admission: fill: expected"),
            (
                "[admission]\nmax_wait_s = inf",
                "admission: max_wait_s: expected",
            ),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected), "{error}");
            assert!(
                error.contains("router.toml") && !error.contains('\n'),
                "{error}"
            );
            for rusts in ["expected u16", "expected f64", "expected usize"] {
                assert!(!error.contains(rusts), "{error}");
            }
        }
    }

    #[test]
    fn an_error_in_json_names_the_worker_and_the_field() {
        for (text, expected) in [
            (
                r#"{"workers": [{"url": "http://a:1"}, {"url": "http://b:1", "role": "cook"}]}"#,
                "worker http://b:1: role: unknown variant `cook`",
            ),
            (
                r#"{"workers": [{"url": "http://a:1", "id": "w", "colour": 1}]}"#,
                "worker w: unknown field `colour`",
            ),
            (r#"{"port": 99999}"#, "port: invalid value: integer `99999`"),
        ] {
            let error = Config::from_json(text).expect_err(text);
            assert!(error.starts_with(expected), "{error}");
            assert!(!error.contains("column"), "{error}");
        }
    }

    #[test]
    fn a_policys_parameter_is_named() {
        for (params, expected) in [
            (
                serde_json::json!({"overload_factor": "abc"}),
                "policy_params: overload_factor: invalid type: string \"abc\", expected a number",
            ),
            (
                serde_json::json!({"overload_factor": -1}),
                "policy_params: overload_factor: expected a number of 0 or more, not -1",
            ),
            (
                serde_json::json!({"factor": 1}),
                "policy_params: unknown field `factor`, expected",
            ),
        ] {
            let built = decision::policy::build("unified", params);
            let error = built.err().expect("refused");
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
