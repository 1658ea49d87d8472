//! A request of the gateway: what the decision needs of it, and how one of the gateway's routers is asked for it.

use crate::workers::Release;
use axum::response::Response;
use decision::fleet::prefix::hash::PromptHashes;
use decision::fleet::{Hints, Request, SGLANG_GROUP, Separable, random_id};
use http::HeaderMap;
use llm_tokenizer::traits::Tokenizer;
use openai_protocol::chat::ChatCompletionRequest;
use openai_protocol::common::{GenerationRequest, InputIds, StringOrArray};
use openai_protocol::completion::CompletionRequest;
use openai_protocol::generate::GenerateRequest;
use openai_protocol::messages::CreateMessageRequest;
use openai_protocol::responses::ResponsesRequest;
use smg::middleware::TenantRequestMeta;
use smg::routers::RouterTrait;
use smg::routers::grpc::utils::process_chat_messages;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock};

/// In the order in which they are believed; those that our own front reads.
const SESSIONS: [&str; 6] = [
    "x-session-id",
    "x-smg-routing-key",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
];
/// Longer names of sessions and requests are cut.
const MAX_ID_BYTES: usize = 256;

/// What came with a request beside its body.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub headers: Option<&'a HeaderMap>,
    pub tenant: &'a TenantRequestMeta,
    pub model: &'a str,
}

/// A request for an answer.
#[derive(Clone)]
pub enum Asked {
    Generate(GenerateRequest),
    Chat(ChatCompletionRequest),
    Completion(CompletionRequest),
    Responses(ResponsesRequest),
    Messages(CreateMessageRequest),
}

impl Asked {
    /// Asks one of the gateway's routers.
    pub async fn send(self, router: &dyn RouterTrait, call: Call<'_>) -> Response {
        let Call {
            headers,
            tenant,
            model,
        } = call;
        match self {
            Self::Generate(body) => router.route_generate(headers, tenant, body, model).await,
            Self::Chat(body) => router.route_chat(headers, tenant, body, model).await,
            Self::Completion(body) => router.route_completion(headers, tenant, body, model).await,
            Self::Responses(body) => router.route_responses(headers, tenant, body, model).await,
            Self::Messages(body) => router.route_messages(headers, tenant, body, model).await,
        }
    }

    pub fn is_stream(&self) -> bool {
        self.generation().is_stream()
    }

    fn generation(&self) -> &dyn GenerationRequest {
        match self {
            Self::Generate(body) => body,
            Self::Chat(body) => body,
            Self::Completion(body) => body,
            Self::Responses(body) => body,
            Self::Messages(body) => body,
        }
    }

    /// The prompt in the model's tokens, where they are given or `tokenizer` makes them as the engine does; else
    /// by its text.
    pub fn prompt(&self, tokenizer: Option<&Arc<dyn Tokenizer>>, block: usize) -> PromptHashes {
        let tokens = self.given().or_else(|| self.encoded(tokenizer?.as_ref()));
        match tokens {
            Some(tokens) => PromptHashes::of_tokens(&tokens, block),
            None => {
                let text = self.generation().extract_text_for_routing();
                PromptHashes::of_text(text.as_bytes(), block)
            }
        }
    }

    /// Token ids that the client sent; of several prompts those of the first.
    fn given(&self) -> Option<Vec<u32>> {
        let Self::Generate(body) = self else {
            return None;
        };
        let ids = match body.input_ids.as_ref()? {
            InputIds::Single(ids) => ids,
            InputIds::Batch(several) => several.first()?,
        };
        ids.iter().map(|&id| u32::try_from(id).ok()).collect()
    }

    fn encoded(&self, tokenizer: &dyn Tokenizer) -> Option<Vec<u32>> {
        let chat;
        let (text, with_special) = match self {
            Self::Generate(body) => (body.text.as_deref()?, true),
            Self::Completion(body) => match &body.prompt {
                StringOrArray::String(text) => (&**text, true),
                StringOrArray::Array(several) => (several.first()?.as_str(), true),
            },
            Self::Chat(body) => {
                chat = process_chat_messages(body, tokenizer, None).ok()?.text;
                (&*chat, false)
            }
            Self::Responses(_) | Self::Messages(_) => return None,
        };
        let encoded = tokenizer.encode(text, with_special).ok()?;
        Some(encoded.token_ids().to_vec())
    }

    /// What the decision is asked for; `oldest` is the oldest release of SGLang among the workers.
    pub fn request(
        &self,
        call: Call<'_>,
        prompt: PromptHashes,
        oldest: Option<Release>,
    ) -> Request {
        let headers = call.headers;
        let client = call.tenant.tenant_key().as_str();
        let (of_each, prompts) = self.counts();
        Request {
            request_id: header(headers, "x-request-id")
                .unwrap_or_else(|| random_id(self.as_random(&prompt))),
            session_id: SESSIONS.iter().find_map(|name| header(headers, name)),
            // Names of sessions belong to the key that came with them.
            tenant: match client.starts_with("auth:") || client.starts_with("header:") {
                true => hash_of(client),
                false => 0,
            },
            client: Some(hash_of(client)),
            max_output_tokens: self.max_output_tokens(),
            stream: self.is_stream(),
            hints: Hints {
                ends: header(headers, "x-session-end").is_some_and(|it| it == "1" || it == "true"),
                parent_session: header(headers, "x-parent-session"),
                ..Hints::default()
            },
            separable: match self {
                // A transfer is for one answer.
                _ if of_each > 1 => Separable::ByNone,
                _ if oldest.is_some_and(|oldest| oldest < self.separates_from()) => {
                    Separable::ByNone
                }
                // The response before stands where it was made.
                Self::Responses(body) if body.previous_response_id.is_some() => Separable::ByNone,
                _ if prompts > 1 => Separable::InGroup(SGLANG_GROUP),
                _ => Separable::ByAll,
            },
            answers: of_each * prompts,
            prompts,
            prompt,
            ..Request::default()
        }
    }

    /// The first release of SGLang that reads in such a request where its KV comes from.
    fn separates_from(&self) -> Release {
        match self {
            Self::Generate(_) | Self::Chat(_) | Self::Completion(_) => [0; 3],
            Self::Responses(_) => [0, 5, 20],
            Self::Messages(_) => [0, 5, 22],
        }
    }

    /// Nothing depends on it but that requests have different names.
    fn as_random(&self, prompt: &PromptHashes) -> u64 {
        RandomState::new().hash_one((prompt.tokens(), self.is_stream()))
    }

    /// How many answers to each prompt, and how many prompts.
    fn counts(&self) -> (u64, u64) {
        let (of_each, prompts) = match self {
            Self::Generate(body) => match &body.input_ids {
                Some(InputIds::Batch(several)) => (1, several.len()),
                _ => (1, 1),
            },
            Self::Chat(body) => (body.n.unwrap_or(1), 1),
            Self::Completion(body) => {
                let prompts = match &body.prompt {
                    StringOrArray::String(_) => 1,
                    StringOrArray::Array(several) => several.len(),
                };
                (body.n.unwrap_or(1), prompts)
            }
            Self::Responses(_) | Self::Messages(_) => (1, 1),
        };
        (u64::from(of_each.max(1)), prompts.max(1) as u64)
    }

    fn max_output_tokens(&self) -> Option<u64> {
        let tokens = match self {
            Self::Generate(body) => body.sampling_params.as_ref()?.max_new_tokens,
            #[expect(deprecated, reason = "clients still send the older name")]
            Self::Chat(body) => body.max_completion_tokens.or(body.max_tokens),
            Self::Completion(body) => body.max_tokens,
            Self::Responses(body) => body.max_output_tokens,
            Self::Messages(body) => Some(body.max_tokens),
        };
        tokens.map(u64::from)
    }
}

/// The same for the same text, for as long as this process lives.
fn hash_of(text: &str) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one(text)
}

fn header(headers: Option<&HeaderMap>, name: &str) -> Option<String> {
    let value = headers?.get(name)?.to_str().ok()?;
    let cut = (0..=MAX_ID_BYTES.min(value.len())).rev();
    let end = cut.into_iter().find(|&at| value.is_char_boundary(at))?;
    (!value.is_empty()).then(|| value[..end].to_owned())
}
