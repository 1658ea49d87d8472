//! Workers' addresses, as gateways know them, and which of them a request may go to.

use super::messages::{Kind, Metadata, Value};
use crate::config::WorkerSpec;
use crate::gateway::{Gateway, resolve};
use decision::fleet::Reservation;
use std::net::SocketAddr;
use std::sync::Arc;

const NAMESPACE: &str = "envoy.lb.subset_hint";
const KEY: &str = "x-gateway-destination-endpoint-subset";

/// The addresses that a gateway leaves to choose from; none where it leaves all.
pub(super) struct Subset(Option<Vec<String>>);

impl Subset {
    pub fn of(metadata: Option<&Metadata>) -> Self {
        let of_namespace = metadata.and_then(|all| all.filter_metadata.get(NAMESPACE));
        let hint = of_namespace.and_then(|hints| hints.fields.get(KEY));
        Self(hint.map(|hint| {
            let mut all = Vec::new();
            collect(hint, &mut all);
            all
        }))
    }

    fn has(&self, address: SocketAddr) -> bool {
        let is_one = |text: &String| text.parse::<SocketAddr>() == Ok(address);
        self.0.as_ref().is_none_or(|all| all.iter().any(is_one))
    }

    /// A worker's address, of those that are left. The first of a name's addresses is the one that its system
    /// prefers.
    async fn address(&self, worker: &WorkerSpec) -> Result<SocketAddr, String> {
        let authority = worker.authority();
        let all = tokio::net::lookup_host(authority).await;
        let all = all.and_then(|all| resolve::allowed(authority, all.collect()));
        let mut all = all.map_err(|error| format!("{authority}: {error}"))?;
        all.find(|address| self.has(*address))
            .ok_or_else(|| format!("{authority}: it is none of the gateway's endpoints"))
    }

    async fn named(&self, worker: &WorkerSpec) -> Result<SocketAddr, (String, String)> {
        let address = self.address(worker).await;
        address.map_err(|message| (worker.id.clone(), message))
    }

    /// Ids of the workers that are not left.
    pub async fn others(&self, gateway: &Gateway) -> Vec<String> {
        let mut others = Vec::new();
        if self.0.is_none() {
            return others;
        }
        for worker in gateway.fleet.snapshot() {
            if self.address(&worker.spec).await.is_err() {
                others.push(worker.spec.id.clone());
            }
        }
        others
    }

    /// The first of these workers that is left, with its address.
    pub async fn first(
        &self,
        workers: Vec<Arc<WorkerSpec>>,
    ) -> Option<(Arc<WorkerSpec>, SocketAddr)> {
        for worker in workers {
            if let Ok(address) = self.address(&worker).await {
                return Some((worker, address));
            }
        }
        None
    }

    /// The addresses of a reservation's workers: of the one that answers, and of the one that prefills.
    ///
    /// # Errors
    /// The worker that has none, and why.
    pub async fn addresses(
        &self,
        reservation: &Reservation,
    ) -> Result<(SocketAddr, Option<SocketAddr>), (String, String)> {
        let answering = self.named(reservation.answering()).await?;
        let prefill = match reservation.prefill() {
            Some(prefill) => Some(self.named(prefill).await?),
            None => None,
        };
        Ok((answering, prefill))
    }
}

/// Addresses, separated by commas or in a list.
fn collect(value: &Value, all: &mut Vec<String>) {
    match &value.kind {
        Some(Kind::Text(text)) => {
            let each = text.split(',').map(str::trim);
            all.extend(each.filter(|it| !it.is_empty()).map(str::to_owned));
        }
        Some(Kind::List(list)) => list.values.iter().for_each(|value| collect(value, all)),
        Some(Kind::Struct(_)) | None => {}
    }
}
