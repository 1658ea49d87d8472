//! A router of the gateway: requests for an answer go where the decision says, all else where the gateway's regular
//! router sends it.

use crate::asked::{Asked, Call};
use crate::attempt::Decisions;
use crate::dispatch::Dispatch;
use async_trait::async_trait;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http::HeaderMap;
use openai_protocol::chat::ChatCompletionRequest;
use openai_protocol::classify::ClassifyRequest;
use openai_protocol::completion::CompletionRequest;
use openai_protocol::embedding::EmbeddingRequest;
use openai_protocol::generate::GenerateRequest;
use openai_protocol::messages::{CountMessageTokensRequest, CreateMessageRequest};
use openai_protocol::rerank::RerankRequest;
use openai_protocol::responses::ResponsesRequest;
use openai_protocol::worker::WorkerType;
use smg::app_context::AppContext;
use smg::middleware::TenantRequestMeta;
use smg::routers::{RouterFactory, RouterTrait, error};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Prompts of fewer bytes are made tokens where they are: to hand them to a thread takes longer.
const SHORT_BYTES: usize = 4096;

pub struct DecidingRouter {
    context: Arc<AppContext>,
    decisions: Decisions,
    dispatch: Dispatch,
    /// For what is no prompt, where workers serve alone.
    regular: Arc<dyn RouterTrait>,
}

impl fmt::Debug for DecidingRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DecidingRouter")
    }
}

impl DecidingRouter {
    /// # Errors
    /// The gateway cannot make its regular router.
    pub async fn new(context: Arc<AppContext>, decisions: Decisions) -> Result<Self, String> {
        let regular = RouterFactory::create_regular_router(&context).await?;
        let dispatch = Dispatch::new(Arc::clone(&context), Arc::clone(&decisions.known));
        Ok(Self {
            context,
            decisions,
            dispatch,
            regular: Arc::from(regular),
        })
    }

    async fn answer(
        &self,
        asked: Asked,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        model: &str,
    ) -> Response {
        let call = Call {
            headers,
            tenant,
            model,
        };
        let block = self.decisions.fleet.token_block();
        let tokenizer = self.tokenizer(call.model);
        let reads = asked.clone();
        let read = move || reads.prompt(tokenizer.as_ref(), block);
        let bytes = call
            .headers
            .and_then(|headers| headers.get("content-length"));
        let bytes = bytes.and_then(|value| value.to_str().ok()?.parse().ok());
        let prompt = match bytes {
            Some(0..SHORT_BYTES) => read(),
            _ => match tokio::task::spawn_blocking(read).await {
                Ok(prompt) => prompt,
                Err(failed) => {
                    return error::internal_error("prompt", format!("reading it: {failed}"));
                }
            },
        };
        let oldest = {
            let known = self.decisions.known.read();
            known.values().filter_map(|of| of.release).min()
        };
        let request = asked.request(call, prompt, oldest);
        self.decisions
            .answer(&self.dispatch, asked, request, call)
            .await
    }

    fn tokenizer(&self, model: &str) -> Option<Arc<dyn llm_tokenizer::traits::Tokenizer>> {
        let config = &self.context.router_config;
        let named = config
            .tokenizer_path
            .as_ref()
            .or(config.model_path.as_ref());
        let registry = &self.context.tokenizer_registry;
        registry
            .get(model)
            .or_else(|| named.and_then(|name| registry.get(name)))
    }

    /// For what is no prompt: the gateway's own choice among the workers that serve alone, or, where there are only
    /// elastic ones, one of these.
    async fn other(&self) -> Arc<dyn RouterTrait> {
        let regular = WorkerType::Regular;
        if self.context.worker_registry.get_by_type(regular).is_empty()
            && let Ok(Some(router)) = self.dispatch.any().await
        {
            return router;
        }
        Arc::clone(&self.regular)
    }
}

#[async_trait]
impl RouterTrait for DecidingRouter {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn router_type(&self) -> &'static str {
        "deltaserve"
    }

    async fn route_generate(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: GenerateRequest,
        model: &str,
    ) -> Response {
        self.answer(Asked::Generate(body), headers, tenant, model)
            .await
    }

    async fn route_chat(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: ChatCompletionRequest,
        model: &str,
    ) -> Response {
        self.answer(Asked::Chat(body), headers, tenant, model).await
    }

    async fn route_completion(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: CompletionRequest,
        model: &str,
    ) -> Response {
        self.answer(Asked::Completion(body), headers, tenant, model)
            .await
    }

    async fn route_responses(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: ResponsesRequest,
        model: &str,
    ) -> Response {
        self.answer(Asked::Responses(body), headers, tenant, model)
            .await
    }

    async fn route_messages(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: CreateMessageRequest,
        model: &str,
    ) -> Response {
        self.answer(Asked::Messages(body), headers, tenant, model)
            .await
    }

    async fn route_messages_count_tokens(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: CountMessageTokensRequest,
        model: &str,
    ) -> Response {
        let router = self.other().await;
        router
            .route_messages_count_tokens(headers, tenant, body, model)
            .await
    }

    async fn route_embeddings(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: EmbeddingRequest,
        model: &str,
    ) -> Response {
        let router = self.other().await;
        router.route_embeddings(headers, tenant, body, model).await
    }

    async fn route_classify(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: ClassifyRequest,
        model: &str,
    ) -> Response {
        let router = self.other().await;
        router.route_classify(headers, tenant, body, model).await
    }

    async fn route_rerank(
        &self,
        headers: Option<&HeaderMap>,
        tenant: &TenantRequestMeta,
        body: RerankRequest,
        model: &str,
    ) -> Response {
        let router = self.other().await;
        router.route_rerank(headers, tenant, body, model).await
    }

    async fn health_generate(&self, request: Request<Body>) -> Response {
        self.other().await.health_generate(request).await
    }

    async fn get_server_info(&self, request: Request<Body>) -> Response {
        self.other().await.get_server_info(request).await
    }

    async fn get_model_info(&self, request: Request<Body>) -> Response {
        self.other().await.get_model_info(request).await
    }
}
