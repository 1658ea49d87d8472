//! What sets a request's KV apart from that of the same tokens in other requests, where bodies say so.
//!
//! Engines keep it apart by the LoRA adapter and by a salt of the client's: vLLM (0.26.0) by `cache_salt`,
//! SGLang (0.5.17) by `cache_salt` and `extra_key`. SGLang names an adapter by `lora_path` too.

use super::models::Models;
use super::session;
use decision::fleet::prefix::hash::Namespace;

/// What a body says of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Apart {
    pub(super) lora_path: Option<String>,
    pub(super) cache_salt: Option<String>,
    pub(super) extra_key: Option<String>,
}

impl Apart {
    /// The namespace of a request that has this and names `model`. An adapter among the models goes before
    /// a `lora_path`, as in SGLang.
    pub(super) fn namespace(&self, model: Option<&str>, models: &Models) -> Namespace {
        let among_models = model.and_then(|model| models.adapter(model));
        let adapter = among_models.as_deref().or(self.lora_path.as_deref());
        let salts = [self.cache_salt.as_deref(), self.extra_key.as_deref()];
        Namespace::of(adapter, salts)
    }
}

/// A name as its value stands in a body; none where that is `null`.
pub(super) fn name(raw: &[u8]) -> Option<String> {
    let name = match raw.first()? {
        b'"' => serde_json::from_slice(raw).ok()?,
        // One for each prompt of a batch: together they are a name as good as any.
        b'[' => String::from_utf8_lossy(raw).into_owned(),
        _ => return None,
    };
    Some(session::bounded(name))
}
