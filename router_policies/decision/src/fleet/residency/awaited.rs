//! The answer after which nothing of a session has come yet.

/// Answers that are likely to be their session's last alike: whether requests name the session, and
/// whether it has had more than this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(pub(super) usize);

impl Kind {
    pub(super) const ALL: usize = 4;

    pub fn new(is_named: bool, answers: u32) -> Self {
        Self(2 * usize::from(is_named) + usize::from(answers > 1))
    }
}

/// A session's last answer so far, after which nothing has come.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    pub(super) kind: Kind,
    pub(super) since_s: f64,
    /// It counts as the session's last.
    pub(super) given_up: bool,
}
