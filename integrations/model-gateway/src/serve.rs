//! Starts the gateway: its workers' registration, health checks, authentication, limits, metrics and routes are its
//! own, its router is ours.
//!
//! `smg::server::startup` builds its router itself and takes none, so that what it does around that is done here
//! again, as far as this binary offers it. Not begun: service discovery, mesh, MCP servers, WebRTC, TLS.

use crate::attempt::Decisions;
use crate::router::DecidingRouter;
use crate::workers;
use axum::serve::ListenerExt;
use decision::fleet::Fleet;
use llm_tokenizer::registry::TokenizerRegistry;
use openai_protocol::worker::WorkerSpec;
use smg::app_context::AppContext;
use smg::config::RouterConfig;
use smg::middleware::{AdmissionQueue, AuthConfig};
use smg::observability::logging::{LoggingConfig, init_logging};
use smg::observability::metrics::{PrometheusConfig, start_prometheus};
use smg::observability::metrics_server::start_metrics_server;
use smg::server::{AppState, build_app};
use smg::worker::WorkerManager;
use smg::worker::manager::WorkerManagerConfig;
use smg::workflow::{
    Job, JobQueue, JobQueueConfig, TokenizerConfigRequest, WorkerRegistrationMode, WorkflowEngines,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// What the command line asks for.
pub struct Setup {
    pub config: RouterConfig,
    pub workers: Vec<WorkerSpec>,
    pub fleet: Arc<Fleet>,
    /// How long a request may wait for a place.
    pub patience: Duration,
    /// Attempts on other workers.
    pub retries: usize,
    pub prometheus: Option<PrometheusConfig>,
    pub log_level: String,
}

/// Headers whose value becomes the request's id.
const REQUEST_IDS: [&str; 4] = [
    "x-request-id",
    "x-correlation-id",
    "x-trace-id",
    "request-id",
];

/// Serves until it is told to end.
///
/// # Errors
/// One line that says what could not be started.
pub async fn serve(setup: Setup) -> Result<(), String> {
    let config = &setup.config;
    config.validate().map_err(|error| error.to_string())?;
    let level = setup.log_level.to_uppercase().parse::<tracing::Level>();
    let level = level.map_err(|_| format!("--log-level {}: unknown", setup.log_level))?;
    let logging = LoggingConfig {
        level,
        log_dir: config.log_dir.clone(),
        ..LoggingConfig::default()
    };
    let _log = init_logging(logging, config.trace_config.clone());
    if let Some(prometheus) = &setup.prometheus {
        let handle = start_prometheus(prometheus.clone());
        start_metrics_server(handle, prometheus.host.clone(), prometheus.port).await?;
    }
    let timeout_s = config.request_timeout_secs;
    let context = AppContext::from_config(config.clone(), timeout_s, None, Some("none".into()));
    let context = Arc::new(context.await?);
    start_jobs(&context, setup.workers).await?;
    let health = &config.health_check;
    let _manager = WorkerManager::maybe_start(
        Arc::clone(&context.worker_registry),
        WorkerManagerConfig {
            default_check_interval_secs: health.check_interval_secs,
            remove_unhealthy: health.remove_unhealthy_workers,
        },
        context.worker_job_queue.get().cloned(),
        !health.disable_health_check,
        false,
    );
    if let Some(monitor) = &context.worker_monitor {
        monitor.start_event_loop();
    }
    let known = workers::follow(Arc::clone(&setup.fleet), Arc::clone(&context));
    let decisions = Decisions {
        fleet: setup.fleet,
        known,
        patience: setup.patience,
        retries: setup.retries,
    };
    let router = DecidingRouter::new(Arc::clone(&context), decisions).await?;
    let queue = (context.rate_limiter.is_some() && config.queue_size > 0).then(|| {
        let patience = Duration::from_secs(config.queue_timeout_secs);
        Arc::new(AdmissionQueue::new(config.queue_size, patience))
    });
    let probes = smg::health::ProbeState::new(Arc::clone(&context.inflight_tracker));
    let tokenizers: Arc<TokenizerRegistry> = Arc::clone(&context.tokenizer_registry);
    let registry = Arc::clone(&context.worker_registry);
    let _readiness = smg::health::spawn_readiness_maintainer(
        Arc::clone(&probes),
        registry,
        tokenizers,
        config.clone(),
    );
    let state = AppState {
        router: Arc::new(router),
        context: Arc::clone(&context),
        admission_queue: queue,
        gateway: None,
        mesh_handler: None,
        mesh_adapters: None,
        probe_state: probes,
    };
    let app = build_app(
        Arc::new(state),
        context.gateway_auth.clone(),
        AuthConfig::new(config.api_key.clone()),
        None,
        config.max_payload_size,
        REQUEST_IDS.map(str::to_owned).to_vec(),
        config.cors_allowed_origins.clone(),
    );
    let app = app.map_err(|error| format!("a header's name in the configuration: {error}"))?;
    let address = format!("{}:{}", config.host, config.port);
    let listener = TcpListener::bind(&address).await;
    let listener = listener.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("serving on http://{address}");
    // Small pieces of a stream are not held back; where that cannot be set, they come later.
    let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    let inflight = Arc::clone(&context.inflight_tracker);
    let serving = axum::serve(listener, app).with_graceful_shutdown(async move {
        told_to_end().await;
        inflight.begin_drain();
    });
    serving.await.map_err(|error| format!("serving: {error}"))
}

/// The queue that registers workers, with the first of them in it, and the tokenizer's.
async fn start_jobs(context: &Arc<AppContext>, workers: Vec<WorkerSpec>) -> Result<(), String> {
    let config = &context.router_config;
    let sizes = JobQueueConfig {
        queue_capacity: config.job_queue_capacity,
        max_concurrent_jobs: config.job_queue_concurrency,
    };
    let queue = JobQueue::new(sizes, Arc::downgrade(context));
    let engines = WorkflowEngines::new(config);
    // Nobody else has the context yet, so that both are unset.
    let _ = context.worker_job_queue.set(Arc::clone(&queue));
    let _ = context.workflow_engines.set(engines);
    let source = config
        .tokenizer_path
        .as_ref()
        .or(config.model_path.as_ref());
    if let Some(source) = source.filter(|_| !config.disable_tokenizer_autoload) {
        let tokenizer = TokenizerConfigRequest {
            id: TokenizerRegistry::generate_id(),
            name: source.clone(),
            source: source.clone(),
            chat_template_path: config.chat_template.clone(),
            cache_config: config.tokenizer_cache.to_option(),
            fail_on_duplicate: false,
        };
        let job = Job::AddTokenizer {
            config: Box::new(tokenizer),
        };
        queue.submit(job).await?;
    }
    for worker in workers {
        let job = Job::AddWorker {
            config: Box::new(worker),
            registration_mode: WorkerRegistrationMode::Upsert,
        };
        queue.submit(job).await?;
    }
    Ok(())
}

async fn told_to_end() {
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let terminated = async {
        let signal = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate());
        match signal {
            Ok(mut signal) => drop(signal.recv().await),
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = interrupted => {}
        () = terminated => {}
    }
}
