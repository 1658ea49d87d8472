//! Token ids that no model of the fleet has are refused: SGLang (0.5.17) passes them to the model, where
//! they end the scheduler.

use crate::config::WorkerSpec;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many token ids models know: the configured number, else what is known of each worker's.
pub(crate) struct Vocabulary {
    configured: Option<u64>,
    /// Of each worker where that is known, by its id.
    known: Mutex<BTreeMap<String, (Arc<WorkerSpec>, u64)>>,
    /// The smallest of all: a prompt within it is looked at no further.
    smallest: AtomicU64,
}

impl Vocabulary {
    pub fn new(configured: Option<u64>) -> Self {
        let configured = configured.filter(|&size| size > 0);
        Self {
            configured,
            known: Mutex::default(),
            smallest: AtomicU64::new(configured.unwrap_or(u64::MAX)),
        }
    }

    pub fn is_wanted(&self) -> bool {
        self.configured.is_none()
    }

    /// A worker that came up has a model of so many token ids; none where nothing new is known of it.
    pub fn learn(&self, spec: &Arc<WorkerSpec>, size: Option<u64>) {
        if let Some(size) = size.filter(|&size| size > 0) {
            let mut known = self.known.lock();
            known.insert(spec.id.clone(), (Arc::clone(spec), size));
            self.compare(&known);
        }
    }

    /// A registration has left the fleet.
    pub fn forget(&self, spec: &Arc<WorkerSpec>) {
        let mut known = self.known.lock();
        if known
            .get(&spec.id)
            .is_some_and(|(known, _)| Arc::ptr_eq(known, spec))
        {
            known.remove(&spec.id);
            self.compare(&known);
        }
    }

    fn compare(&self, known: &BTreeMap<String, (Arc<WorkerSpec>, u64)>) {
        if self.is_wanted() {
            let smallest = known.values().map(|(_, size)| *size).min();
            self.smallest
                .store(smallest.unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// Why a prompt with this largest token id is refused, if it is. Of several models the smallest counts
    /// that may get the request: those of workers that do not serve its model may not.
    pub fn refusal(
        &self,
        largest: Option<u32>,
        not_serving: impl FnOnce() -> Vec<String>,
    ) -> Option<String> {
        let largest = u64::from(largest?);
        if largest < self.smallest.load(Ordering::Relaxed) {
            return None;
        }
        let size = match self.configured {
            Some(size) => size,
            None => {
                let not_serving = not_serving();
                let known = self.known.lock();
                let serving = known.iter().filter(|(id, _)| !not_serving.contains(id));
                serving.map(|(_, (_, size))| *size).min()?
            }
        };
        (largest >= size)
            .then(|| format!("body: expected token ids below the model's {size}, not {largest}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(id: &str) -> Arc<WorkerSpec> {
        let spec = serde_json::json!({"url": "http://a:1", "id": id});
        Arc::new(serde_json::from_value(spec).expect("a worker"))
    }

    #[test]
    fn ids_beyond_the_smallest_vocabulary_are_refused() {
        let vocabulary = Vocabulary::new(None);
        let refusal = |largest| vocabulary.refusal(Some(largest), Vec::new);
        assert_eq!(refusal(u32::MAX), None);
        vocabulary.learn(&worker("small"), Some(1_000));
        vocabulary.learn(&worker("large"), Some(2_000));
        vocabulary.learn(&worker("unknown"), None);
        assert_eq!(refusal(999), None);
        let refused = refusal(1_000).expect("refused");
        assert!(refused.contains("1000"), "{refused}");
    }

    #[test]
    fn the_vocabulary_of_a_worker_that_may_not_get_the_request_or_is_gone_does_not_count() {
        let vocabulary = Vocabulary::new(None);
        let (small, large) = (worker("small"), worker("large"));
        vocabulary.learn(&small, Some(1_000));
        vocabulary.learn(&large, Some(2_000));
        let of_large = |largest| vocabulary.refusal(Some(largest), || vec!["small".to_owned()]);
        assert_eq!(of_large(1_999), None);
        assert!(of_large(2_000).is_some());
        // Another took its id since.
        vocabulary.forget(&worker("small"));
        assert!(vocabulary.refusal(Some(1_500), Vec::new).is_some());
        vocabulary.forget(&small);
        assert_eq!(vocabulary.refusal(Some(1_500), Vec::new), None);
        // It comes up again with another model.
        vocabulary.learn(&large, Some(3_000));
        assert_eq!(vocabulary.refusal(Some(2_500), Vec::new), None);
        vocabulary.forget(&large);
        assert_eq!(vocabulary.refusal(Some(u32::MAX), Vec::new), None);
    }

    #[test]
    fn a_configured_vocabulary_counts_alone() {
        let vocabulary = Vocabulary::new(Some(1_000));
        vocabulary.learn(&worker("large"), Some(2_000));
        assert!(vocabulary.refusal(Some(1_000), Vec::new).is_some());
        assert_eq!(vocabulary.refusal(Some(999), Vec::new), None);
    }
}
