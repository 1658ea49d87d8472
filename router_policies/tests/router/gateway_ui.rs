//! The page: it is there for everybody, holds nothing secret, and lets only its own script run.

use crate::mock::router::{Router, text};
use http_body_util::Full;
use hyper::{Method, Request, StatusCode};
use router_policies::config::Config;

#[tokio::test]
async fn the_page_is_there_without_the_token_and_its_policy_lets_only_its_own_script_run() {
    let router = Router::begin(Config {
        policy: "round_robin".to_owned(),
        admin_token: Some("a-secret".to_owned()),
        ..Config::default()
    })
    .await;
    let ask = async |method: Method, path: &str| {
        let request = Request::builder().method(method);
        let request = request.uri(format!("{}{path}", router.url));
        let request = request.body(Full::default()).expect("a request");
        router.client.request(request).await.expect("an answer")
    };
    let mut nonces = Vec::new();
    for _ in 0..2 {
        let answer = ask(Method::GET, "/ui").await;
        assert_eq!(answer.status(), StatusCode::OK);
        let policy = &answer.headers()["content-security-policy"];
        let policy = policy.to_str().expect("text").to_owned();
        let (_, nonce) = policy
            .split_once("script-src 'nonce-")
            .expect("a script's nonce");
        let nonce = nonce[..32].to_owned();
        assert!(policy.starts_with("default-src 'none'; "));
        assert!(!policy.contains("unsafe") && !policy.contains('*'));
        let page = text(answer).await;
        assert_eq!(page.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
        assert!(page.contains("data-asks=\"true\"") && !page.contains("a-secret"));
        assert!(!page.contains("innerHTML") && !page.contains("src="));
        nonces.push(nonce);
    }
    assert_ne!(nonces[0], nonces[1]);
    for (method, path, status) in [
        (Method::HEAD, "/ui", StatusCode::OK),
        (Method::GET, "/ui?token=a-secret", StatusCode::BAD_REQUEST),
        (Method::POST, "/ui", StatusCode::METHOD_NOT_ALLOWED),
        (Method::GET, "/sessions", StatusCode::UNAUTHORIZED),
    ] {
        assert_eq!(ask(method, path).await.status(), status, "{path}");
    }
}
