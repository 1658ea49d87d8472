//! vLLM with Mooncake: the decode worker must be told the id of the engine that prefills. The prefill
//! worker's bootstrap server has it: one id for each data-parallel rank, drawn anew at every start.

use super::Gateway;
use decision::model::{WorkerSpec, bracketed};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// No engine ends and starts again within this, so an id that is no older is the present one's.
const KEPT: Duration = Duration::from_secs(5);

/// One data-parallel rank of a prefill worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rank {
    /// None where there is only one: then nobody has to be told.
    pub number: Option<String>,
    pub engine_id: String,
}

struct Asked {
    spec: Arc<WorkerSpec>,
    at: Instant,
    incarnation: Option<u64>,
    ranks: Arc<[Rank]>,
}

/// What bootstrap servers have answered of late, by worker id.
#[derive(Default)]
pub(crate) struct Ranks(Mutex<HashMap<String, Asked>>);

impl Ranks {
    /// Those of this registration, where it was asked of late; another that took its id has its own.
    fn kept(&self, prefill: &Arc<WorkerSpec>, incarnation: Option<u64>) -> Option<Arc<[Rank]>> {
        let asked = self.0.lock();
        let asked = asked.get(&prefill.id)?;
        let is_present = Arc::ptr_eq(&asked.spec, prefill)
            && asked.incarnation == incarnation
            && asked.at.elapsed() < KEPT;
        is_present.then(|| Arc::clone(&asked.ranks))
    }

    /// A registration has left the fleet.
    pub fn forget(&self, spec: &Arc<WorkerSpec>) {
        let mut asked = self.0.lock();
        if asked
            .get(&spec.id)
            .is_some_and(|known| Arc::ptr_eq(&known.spec, spec))
        {
            asked.remove(&spec.id);
        }
    }
}

/// The address of a prefill worker's bootstrap server.
pub(super) fn bootstrap(prefill: &WorkerSpec) -> String {
    let host = bracketed(prefill.bootstrap_host.as_deref().unwrap_or_default());
    format!(
        "http://{host}:{}",
        prefill.bootstrap_port.unwrap_or_default()
    )
}

/// A rank of the prefill worker, any of them as likely as another: the engine would spread requests by
/// its own load, but it cannot be asked which rank it is going to take.
///
/// # Errors
/// One line that names the address.
pub(super) async fn choose_rank(
    gateway: &Gateway,
    prefill: &Arc<WorkerSpec>,
) -> Result<Rank, String> {
    let incarnation = gateway.fleet.incarnation(prefill);
    let ranks = match gateway.ranks.kept(prefill, incarnation) {
        Some(ranks) => ranks,
        None => {
            let ranks: Arc<[Rank]> = ask(gateway, prefill).await?.into();
            let new = Asked {
                spec: Arc::clone(prefill),
                at: Instant::now(),
                incarnation,
                ranks: Arc::clone(&ranks),
            };
            let mut asked = gateway.ranks.0.lock();
            // Nobody would forget those of one that has left.
            if gateway.fleet.health(prefill).is_some() {
                asked.insert(prefill.id.clone(), new);
            }
            ranks
        }
    };
    let at = fastrand::usize(..ranks.len().max(1));
    let none = || format!("{}/query: no engine_id", bootstrap(prefill));
    ranks.get(at).cloned().ok_or_else(none)
}

async fn ask(gateway: &Gateway, prefill: &WorkerSpec) -> Result<Vec<Rank>, String> {
    let url = format!("{}/query", bootstrap(prefill));
    let patience = Duration::from_secs_f64(gateway.config.connect_timeout_s);
    let failed = |error: String| format!("{url}: {error}");
    let (_, answer) = gateway.get_url(&url, patience).await.map_err(failed)?;
    let answer: Value =
        serde_json::from_slice(&answer).map_err(|error| failed(error.to_string()))?;
    Ok(ranks_in(&answer))
}

fn ranks_in(answer: &Value) -> Vec<Rank> {
    let ranks = answer.as_object();
    let is_one = ranks.is_some_and(|ranks| ranks.len() == 1);
    let ranks = ranks.into_iter().flatten().filter_map(|(number, rank)| {
        let engine_id = rank.get("engine_id")?.as_str()?.to_owned();
        let number = (!is_one).then(|| number.clone());
        Some(Rank { number, engine_id })
    });
    ranks.collect()
}
