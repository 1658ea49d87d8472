//! `[kubernetes]`: which pods are workers, and what is to be known of them.

use super::{WORKER_FIELDS, WorkerSpec};
use decision::model::Secret;
use decision::model::checks::read;
use decision::model::worker::bracketed;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Where the pods are that are workers: see `gateway::kubernetes`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kubernetes {
    /// Of their labels, as `kubectl get pods --selector` takes it.
    pub selector: String,
    /// The router's own, or the one of the kubeconfig's context, where it is not said.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Where engines listen in their pods.
    pub port: u16,
    /// Without it the variable `KUBECONFIG`, `~/.kube/config`, or what a pod is given.
    #[serde(default)]
    pub kubeconfig: Option<PathBuf>,
    /// The key that the workers ask for, or `env:NAME`.
    #[serde(default)]
    pub api_key: Option<Secret>,
    /// A worker's fields, for all pods that do not say otherwise.
    #[serde(default)]
    pub worker: Map<String, Value>,
}

/// What the keys of pods' labels and annotations begin with.
pub const PREFIX: &str = "deltaserve/";
/// A pod's name and address say the first two; nobody should write the last into a pod.
const NOT_OF_PODS: [&str; 3] = ["id", "bootstrap_host", "api_key"];

fn is_of_pods(field: &str) -> bool {
    WORKER_FIELDS.contains(&field) && !NOT_OF_PODS.contains(&field)
}

/// What a label or an annotation says: they have no types.
fn typed(text: &str) -> Value {
    let scalar = serde_json::from_str::<Value>(text);
    let scalar = scalar.ok().filter(|it| it.is_number() || it.is_boolean());
    scalar.unwrap_or_else(|| text.into())
}

impl Kubernetes {
    /// Checks every field.
    ///
    /// # Errors
    /// One line that names the field and what was expected.
    pub(super) fn normalise(&mut self) -> Result<(), String> {
        let is_text = |text: &str| !text.trim().is_empty() && !text.contains(char::is_control);
        if !is_text(&self.selector) {
            // An empty one would take every pod of the namespace.
            return Err("kubernetes.selector: expected labels, as in \"app=sglang\"".to_owned());
        }
        let is_name = |name: &str| {
            let plain =
                |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
            !name.is_empty() && name.chars().all(plain)
        };
        if self.namespace.as_deref().is_some_and(|it| !is_name(it)) {
            return Err("kubernetes.namespace: expected a namespace's name".to_owned());
        }
        if self.port == 0 {
            return Err("kubernetes.port: expected a number from 1 to 65535, not 0".to_owned());
        }
        if let Some(key) = self.api_key.take() {
            let key = key.of_environment();
            self.api_key = Some(key.map_err(|error| format!("kubernetes.api_key: {error}"))?);
        }
        if let Some(field) = self.worker.keys().find(|field| !is_of_pods(field)) {
            let known: Vec<_> = WORKER_FIELDS
                .into_iter()
                .filter(|it| is_of_pods(it))
                .collect();
            let known = known.join(", ");
            return Err(format!(
                "kubernetes.worker: unknown field `{field}`; known: {known}"
            ));
        }
        let worker = self.worker_at("pod", "192.0.2.1", &BTreeMap::new());
        worker
            .map(drop)
            .map_err(|error| match error.split_once(": ") {
                Some(("api_key", expected)) => format!("kubernetes.api_key: {expected}"),
                _ => format!("kubernetes.worker.{error}"),
            })
    }

    /// The worker in the pod of this name and address, of which `own` says what is its own.
    ///
    /// # Errors
    /// One line that names the field and what was expected.
    pub fn worker_at(
        &self,
        name: &str,
        address: &str,
        own: &BTreeMap<&str, &str>,
    ) -> Result<WorkerSpec, String> {
        let host = bracketed(address);
        let mut port = self.port;
        let mut fields = self.worker.clone();
        for (field, text) in own {
            if *field == "port" {
                let number = text.parse().ok().filter(|number| *number > 0);
                let expected = "expected a number from 1 to 65535";
                port = number.ok_or_else(|| format!("port: {expected}, not {text:?}"))?;
            } else if is_of_pods(field) {
                fields.insert((*field).to_owned(), typed(text));
            } else {
                return Err(format!("{field}: it is no field of a pod's worker"));
            }
        }
        for field in ["kv_events", "kv_events_replay"] {
            // As engines are told: on every address of theirs.
            if let Some(Value::String(endpoint)) = fields.get_mut(field) {
                *endpoint = endpoint.replace('*', &host);
            }
        }
        fields.insert("id".to_owned(), name.into());
        fields.insert("url".to_owned(), format!("http://{host}:{port}").into());
        let mut spec: WorkerSpec = read(fields.into())?;
        spec.api_key.clone_from(&self.api_key);
        let named = format!("worker {name}: ");
        spec.normalise()
            .map_err(|error| error.strip_prefix(&named).unwrap_or(&error).to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Engine};
    use decision::policy::Role;

    fn of(text: &str) -> Result<Kubernetes, String> {
        let config = Config::from_toml(&format!("[kubernetes]\n{text}"));
        let config = config.map_err(|(_, message)| message)?.normalise()?;
        config.kubernetes.ok_or_else(|| "none".to_owned())
    }

    #[test]
    fn a_pods_own_fields_come_before_those_of_all_pods() {
        let all = "selector = \"app=sglang\"\nport = 30000\n[kubernetes.worker]\nengine = \"vllm\"\n\
                   kv_capacity_tokens = 1000\nkv_events = \"tcp://*:5557\"\n";
        let kubernetes = of(all).expect("valid");
        let own = BTreeMap::from([("port", "8000"), ("kv_capacity_tokens", "2000")]);
        let spec = kubernetes
            .worker_at("w-0", "10.0.0.7", &own)
            .expect("a worker");
        assert_eq!((&*spec.id, &*spec.url), ("w-0", "http://10.0.0.7:8000"));
        assert_eq!((spec.engine, spec.role), (Engine::Vllm, Role::Colocated));
        assert_eq!(spec.kv_capacity_tokens, Some(2000));
        assert_eq!(spec.kv_events.as_deref(), Some("tcp://10.0.0.7:5557"));
        let spec = kubernetes
            .worker_at("w-1", "fd00::7", &BTreeMap::new())
            .expect("a worker");
        assert_eq!(spec.url, "http://[fd00::7]:30000");
        assert_eq!(spec.kv_events.as_deref(), Some("tcp://[fd00::7]:5557"));
    }

    #[test]
    fn what_a_pod_says_wrong_is_named() {
        let kubernetes = of("selector = \"app=sglang\"\nport = 30000\n").expect("valid");
        for (field, text, expected) in [
            (
                "port",
                "http",
                "port: expected a number from 1 to 65535, not \"http\"",
            ),
            ("role", "cook", "role: unknown variant `cook`"),
            (
                "role",
                "prefill",
                "bootstrap_port: a prefill worker of SGLang needs one",
            ),
            (
                "page_size",
                "big",
                "page_size: invalid type: string \"big\"",
            ),
            ("rolle", "decode", "rolle: it is no field of a pod's worker"),
            (
                "api_key",
                "a-key",
                "api_key: it is no field of a pod's worker",
            ),
        ] {
            let own = BTreeMap::from([(field, text)]);
            let error = kubernetes
                .worker_at("w-0", "10.0.0.7", &own)
                .expect_err(field);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_wrong_setting_is_named() {
        let valid = "selector = \"app=sglang\"\nport = 30000\n";
        for (text, expected) in [
            ("port = 30000\n", "kubernetes: missing field `selector`"),
            ("selector = \"a=b\"\n", "kubernetes: missing field `port`"),
            (
                "selector = \" \"\nport = 1\n",
                "kubernetes.selector: expected labels",
            ),
            (
                "selector = \"a=b\"\nport = 0\n",
                "kubernetes.port: expected a number",
            ),
            (
                "selector = \"a=b\"\nport = \"http\"\n",
                "kubernetes.port: invalid type: string",
            ),
            (
                &format!("{valid}namespaces = \"a\"\n"),
                "kubernetes: unknown field `namespaces`",
            ),
            (
                &format!("{valid}namespace = \"A B\"\n"),
                "kubernetes.namespace: expected a namespace",
            ),
            (
                &format!("{valid}api_key = \"a key\"\n"),
                "kubernetes.api_key: expected printable",
            ),
            (
                &format!("{valid}api_key = \"env:NOT_SET_AT_ALL\"\n"),
                "kubernetes.api_key: the variable",
            ),
            (
                &format!("{valid}[kubernetes.worker]\nrole = \"cook\"\n"),
                "kubernetes.worker.role: unknown variant",
            ),
            (
                &format!("{valid}[kubernetes.worker]\npage_size = 0\n"),
                "kubernetes.worker.page_size: expected a number",
            ),
            (
                &format!("{valid}[kubernetes.worker]\nurl = \"http://a:1\"\n"),
                "kubernetes.worker: unknown field `url`",
            ),
        ] {
            let error = of(text).expect_err(text);
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn the_workers_key_is_not_shown() {
        let text = "selector = \"app=sglang\"\nport = 30000\napi_key = \"a-key-of-workers\"\n";
        let kubernetes = of(text).expect("valid");
        assert!(!format!("{kubernetes:?}").contains("a-key-of-workers"));
        let spec = kubernetes
            .worker_at("w-0", "10.0.0.7", &BTreeMap::new())
            .expect("a worker");
        assert_eq!(spec.api_key.expect("a key").as_str(), "a-key-of-workers");
    }
}
