//! Whose a turn is: the names of sessions and families.

use serde::{Serialize, Serializer};
use std::sync::Arc;

/// A session's name among all, hashed; families by prefix have numbers of their own.
pub type Key = u64;

/// A session's name, as its requests have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(Arc<str>);

impl From<&str> for Name {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl std::ops::Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Serialize for Name {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self)
    }
}

/// Whose turn a request is.
#[derive(Clone, Debug)]
pub struct Identity {
    pub key: Key,
    /// Its tenant.
    pub payer: usize,
    pub name: Option<Name>,
    /// A call beside the session's conversation, which it does not go on.
    pub is_aside: bool,
}
