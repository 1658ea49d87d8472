//! Which worker is meant: one of an id, or exactly one registration.

use crate::model::WorkerSpec;
use std::sync::Arc;

/// Names a worker. What was begun for one registration (a watcher, a request) names it by what the
/// fleet handed out for it, so that its news never reach another worker that took the same id.
#[derive(Clone, Copy)]
pub enum Which<'a> {
    Id(&'a str),
    Registration(&'a Arc<WorkerSpec>),
}

impl Which<'_> {
    pub(super) fn id(&self) -> &str {
        match self {
            Self::Id(id) => id,
            Self::Registration(registered) => &registered.id,
        }
    }

    pub(super) fn is(&self, spec: &Arc<WorkerSpec>) -> bool {
        match self {
            Self::Id(id) => spec.id == *id,
            Self::Registration(registered) => Arc::ptr_eq(registered, spec),
        }
    }
}

impl<'a> From<&'a str> for Which<'a> {
    fn from(id: &'a str) -> Self {
        Self::Id(id)
    }
}

impl<'a> From<&'a String> for Which<'a> {
    fn from(id: &'a String) -> Self {
        Self::Id(id)
    }
}

impl<'a> From<&'a Arc<WorkerSpec>> for Which<'a> {
    fn from(registered: &'a Arc<WorkerSpec>) -> Self {
        Self::Registration(registered)
    }
}
