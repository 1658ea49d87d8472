//! The router's part of the module: JSON in, JSON out, and one call that serves.

use decision::fleet::admission::{rules, settings};
use decision::policy::{self, Decision, Policy, Reason, Refusal, Route, View};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use router_policies::config::Config;
use router_policies::gateway::Server;
use std::path::PathBuf;

/// The table of paths that the router serves, as a JSON list.
#[pyfunction]
pub fn paths() -> PyResult<String> {
    let served = &router_policies::gateway::paths::SERVED[..];
    serde_json::to_string(served).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Reads and checks a configuration file; returns it as JSON. Raises ValueError with one line.
#[pyfunction]
pub fn load_config(path: PathBuf) -> PyResult<String> {
    let config = Config::from_file(&path).map_err(PyValueError::new_err)?;
    serde_json::to_string(&config).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A policy written in Python: called with the view as JSON, answers with a route as JSON or null.
struct PythonPolicy(Py<PyAny>);

impl Policy for PythonPolicy {
    fn decide(&self, view: &View<'_>) -> Result<Decision, Refusal> {
        let failed = |error: String| {
            log::error!("policy: {error}");
            Refusal::PolicyFailed
        };
        let view = serde_json::to_string(view).map_err(|error| failed(error.to_string()))?;
        let answer = Python::attach(|py| self.0.call1(py, (view,))?.extract::<String>(py))
            .map_err(|error: PyErr| failed(error.to_string()))?;
        let route: Option<Route> = serde_json::from_str(&answer)
            .map_err(|error| failed(format!("its answer {answer}: {error}")))?;
        let route = route.ok_or(Refusal::NoCandidates)?;
        Ok(Decision::unpredicted(route, Reason::Custom))
    }
}

/// Raises ValueError with one line where a router of `config` would not start, or could place no
/// request with all its workers up; returns a line for each worker that does not answer its health check, and
/// whether it may only not have started yet. `decide` as in `serve`.
#[pyfunction]
#[pyo3(signature = (config, decide=None))]
pub fn check(
    py: Python<'_>,
    config: &str,
    decide: Option<Py<PyAny>>,
) -> PyResult<Vec<(String, bool)>> {
    let config = Config::from_json(config).map_err(PyValueError::new_err)?;
    let policy = decide.map(|decide| Box::new(PythonPolicy(decide)) as Box<dyn Policy>);
    let unreached = py
        .detach(|| router_policies::gateway::check(config, policy))
        .map_err(PyValueError::new_err)?;
    let lines = unreached.into_iter().map(|it| (it.words, it.may_start));
    Ok(lines.collect())
}

/// Serves until SIGINT or SIGTERM. `announce` is called with the address once it is bound, and with that of the
/// endpoint picker if there is one; `decide` takes the place of the configured policy.
#[pyfunction]
#[pyo3(signature = (config, announce, decide=None))]
pub fn serve(
    py: Python<'_>,
    config: &str,
    announce: Py<PyAny>,
    decide: Option<Py<PyAny>>,
) -> PyResult<()> {
    let config = Config::from_json(config)
        .and_then(Config::normalise)
        .map_err(PyValueError::new_err)?;
    let _ = env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info"))
        .format_target(false)
        .try_init();
    py.detach(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.threads)
            .enable_all()
            .build()
            .map_err(|error| PyOSError::new_err(error.to_string()))?;
        let result = runtime.block_on(async {
            let stop = stop_signal().map_err(|error| PyOSError::new_err(error.to_string()))?;
            let bound = match decide {
                Some(decide) => Server::bind_with(config, Box::new(PythonPolicy(decide))).await,
                None => Server::bind(config).await,
            };
            let server = bound.map_err(PyValueError::new_err)?;
            let address = server.address()?.to_string();
            let picker = server.picker_address().map(|picker| picker.to_string());
            Python::attach(|py| announce.call1(py, (address, picker)))?;
            let reopen = reopen_signal(server.reopen_logs())
                .map_err(|error| PyOSError::new_err(error.to_string()))?;
            let reopening = tokio::spawn(reopen);
            server.serve(stop).await;
            reopening.abort();
            Ok(())
        });
        runtime.shutdown_timeout(std::time::Duration::from_secs(1));
        result
    })
}

/// Resolves at the first SIGINT or SIGTERM.
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        log::info!("stopping: no new requests, running ones may end");
    })
}

/// Calls `reopen` at every SIGHUP, which ends no request.
fn reopen_signal(reopen: impl Fn()) -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        while hangup.recv().await.is_some() {
            log::info!("SIGHUP: the decision log is opened again");
            reopen();
        }
    })
}

/// The table of policies, as JSON.
#[pyfunction]
pub fn policies() -> PyResult<String> {
    let table: Vec<_> = policy::TABLE
        .iter()
        .map(|info| {
            serde_json::json!({
                "name": info.name, "summary": info.summary, "rule": info.rule,
                "params": info.params, "source": info.source, "measured": info.measured,
            })
        })
        .collect();
    serde_json::to_string(&table).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The table of admission's rules and the settings that hold beside their own, as JSON.
#[pyfunction]
pub fn admission_rules() -> PyResult<String> {
    let table: Vec<_> = rules::TABLE
        .iter()
        .map(|info| {
            serde_json::json!({
                "name": info.name, "summary": info.summary, "rule": info.rule,
                "params": info.params, "source": info.source,
            })
        })
        .collect();
    let all = serde_json::json!({"rules": table, "settings": settings::PARAMS});
    serde_json::to_string(&all).map_err(|error| PyValueError::new_err(error.to_string()))
}
