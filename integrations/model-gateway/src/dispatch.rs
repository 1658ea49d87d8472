//! The gateway's own routers, each before exactly the workers that a decision named: the gateway then dispatches, with
//! its own headers, bootstrap fields, parsers and metrics, and has nothing left to choose.
//!
//! `smg`'s routers choose their workers themselves, from a registry, and take no choice. So a router gets a registry
//! of its own, with one worker in it or with one prefill and one decode worker. The gateway knows a worker by one
//! type; an elastic worker is a decode worker to it, and for what it serves alone, a regular one of the same address.

use crate::workers::{Known, KnownWorkers};
use openai_protocol::worker::{HealthCheckConfig, WorkerStatus, WorkerType};
use parking_lot::Mutex;
use smg::app_context::AppContext;
use smg::config::PolicyConfig;
use smg::policies::PolicyRegistry;
use smg::routers::{RouterFactory, RouterTrait};
use smg::worker::{BasicWorkerBuilder, Worker, WorkerLoadGuard, WorkerRegistry};
use std::collections::HashMap;
use std::sync::Arc;

/// A router and the workers that it was made for.
struct Made {
    before: Vec<Arc<dyn Worker>>,
    router: Arc<dyn RouterTrait>,
}

/// The routers that there are by now.
pub struct Dispatch {
    context: Arc<AppContext>,
    known: KnownWorkers,
    /// By the ids of the answering and of the prefill worker.
    made: Mutex<HashMap<(String, Option<String>), Made>>,
}

/// Where a request goes.
pub struct Way {
    pub router: Arc<dyn RouterTrait>,
    /// Counts the request with the gateway's worker, where its router does not.
    pub counted: Option<WorkerLoadGuard>,
}

impl Dispatch {
    pub fn new(context: Arc<AppContext>, known: KnownWorkers) -> Self {
        Self {
            context,
            known,
            made: Mutex::default(),
        }
    }

    /// The way to the workers of these ids; none where one of them is gone.
    ///
    /// # Errors
    /// The gateway cannot make a router.
    pub async fn way(&self, answering: &str, prefill: Option<&str>) -> Result<Option<Way>, String> {
        let (answering, prefill) = {
            let known = self.known.read();
            let find = |id: &str| known.get(id).cloned();
            match (find(answering), prefill.map(find)) {
                (Some(answering), None) => (answering, None),
                (Some(answering), Some(Some(prefill))) => (answering, Some(prefill)),
                _ => return Ok(None),
            }
        };
        let is_twin = prefill.is_none() && *answering.worker.worker_type() != WorkerType::Regular;
        let counted = is_twin.then(|| WorkerLoadGuard::with_key(answering.worker.clone(), None));
        let router = self.router(answering, prefill).await?;
        Ok(Some(Way { router, counted }))
    }

    /// One before any worker that serves alone, for what is no prompt; none where there is none.
    ///
    /// # Errors
    /// The gateway cannot make a router.
    pub async fn any(&self) -> Result<Option<Arc<dyn RouterTrait>>, String> {
        let any = {
            let known = self.known.read();
            let mut alone = known.values().filter(|of| {
                decision::fleet::can_serve_whole(&of.spec) && of.worker.is_available()
            });
            alone.next().cloned()
        };
        match any {
            Some(any) => self.router(any, None).await.map(Some),
            None => Ok(None),
        }
    }

    async fn router(
        &self,
        answering: Known,
        prefill: Option<Known>,
    ) -> Result<Arc<dyn RouterTrait>, String> {
        let id = |of: &Known| of.spec.id.clone();
        let key = (id(&answering), prefill.as_ref().map(id));
        let before: Vec<_> = [Some(answering), prefill]
            .into_iter()
            .flatten()
            .map(|of| of.worker)
            .collect();
        if let Some(made) = self.made.lock().get(&key)
            && is_same(&made.before, &before)
        {
            return Ok(Arc::clone(&made.router));
        }
        let router = self.make(&before).await?;
        let mut made = self.made.lock();
        let known = self.known.read();
        made.retain(|(answering, prefill), _| {
            known.contains_key(answering)
                && prefill.as_ref().is_none_or(|id| known.contains_key(id))
        });
        let new = Made {
            before,
            router: Arc::clone(&router),
        };
        made.insert(key, new);
        Ok(router)
    }

    async fn make(&self, before: &[Arc<dyn Worker>]) -> Result<Arc<dyn RouterTrait>, String> {
        let registry = WorkerRegistry::new();
        let is_pair = before.len() > 1;
        for worker in before {
            let is_typed = is_pair || *worker.worker_type() == WorkerType::Regular;
            registry.register_or_replace(match is_typed {
                true => Arc::clone(worker),
                false => regular(worker.as_ref()),
            });
        }
        let mut context = (*self.context).clone();
        context.worker_registry = Arc::new(registry);
        context.policy_registry = Arc::new(PolicyRegistry::new(PolicyConfig::Passthrough));
        // Another attempt is another decision.
        context.router_config.disable_retries = true;
        context.gateway = None;
        let context = Arc::new(context);
        let router = match is_pair {
            true => {
                let only = PolicyConfig::Passthrough;
                RouterFactory::create_pd_router(None, None, &only, &context).await?
            }
            false => RouterFactory::create_regular_router(&context).await?,
        };
        Ok(Arc::from(router))
    }
}

fn is_same(one: &[Arc<dyn Worker>], other: &[Arc<dyn Worker>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// The same engine, as one that serves alone. The gateway checks the worker that it knows, and this one follows the
/// decision.
fn regular(worker: &dyn Worker) -> Arc<dyn Worker> {
    let mut spec = (*worker.metadata().spec).clone();
    spec.worker_type = WorkerType::Regular;
    let unchecked = HealthCheckConfig {
        disable_health_check: true,
        ..HealthCheckConfig::default()
    };
    let twin = BasicWorkerBuilder::from_spec(spec)
        .health_config(unchecked)
        .status(WorkerStatus::Ready);
    let twin = match worker.http_client_handle_if_initialized() {
        Some(client) => twin.http_client(client),
        None => twin,
    };
    Arc::new(twin.build())
}
