//! TLS between clients and the router, and between the router and its workers.

use crate::mock::MockWorker;
use crate::mock::router::{Router, generate, text, until, worker};
use hyper::StatusCode;
use router_policies::config::{Config, WorkerSpec};
use router_policies::gateway::Server;
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// A certificate for 127.0.0.1 that vouches for itself, and its key.
struct Certificate {
    folder: PathBuf,
}

impl Certificate {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("router-tls-{:x}", fastrand::u64(..)));
        std::fs::create_dir_all(&folder).expect("a folder");
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).expect("made");
        std::fs::write(folder.join("cert.pem"), made.cert.pem()).expect("written");
        std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).expect("written");
        Self { folder }
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        Some(self.folder.join(name))
    }
}

impl Drop for Certificate {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

async fn speaking_tls(certificate: &Certificate, mock: &MockWorker) -> Router {
    Router::with(Config {
        workers: vec![worker(mock, "w", "colocated")],
        tls_cert_file: certificate.file("cert.pem"),
        tls_key_file: certificate.file("key.pem"),
        ..Config::default()
    })
    .await
}

fn over_tls(router: &Router) -> WorkerSpec {
    let url = router.url.replace("http://", "https://");
    serde_json::from_value(json!({"url": url, "id": "secure"})).expect("a worker")
}

/// A router that speaks TLS, as the worker of a router that speaks it to its workers.
#[tokio::test]
async fn a_request_goes_over_tls_on_both_sides() {
    let certificate = Certificate::new();
    let mock = MockWorker::start().await;
    let inner = speaking_tls(&certificate, &mock).await;
    let outer = Router::with(Config {
        workers: vec![over_tls(&inner)],
        worker_ca_file: certificate.file("cert.pem"),
        ..Config::default()
    })
    .await;
    let response = outer
        .send("/generate", &[], generate(true).to_string().into_bytes())
        .await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["x-deltaserve-worker"], "secure");
    assert!(text(response).await.contains("[DONE]"));
    assert_eq!(mock.bodies().len(), 1);
    // Who speaks no TLS is not answered, and takes nothing from others.
    let plain = hyper::Request::get(format!("{}/health", inner.url));
    let plain = plain
        .body(http_body_util::Full::default())
        .expect("a request");
    assert!(inner.client.request(plain).await.is_err());
    let again = outer
        .send("/generate", &[], generate(false).to_string().into_bytes())
        .await;
    assert_eq!(again.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_worker_whose_certificate_nobody_vouches_for_is_not_used() {
    let certificate = Certificate::new();
    let other = Certificate::new();
    let mock = MockWorker::start().await;
    let inner = speaking_tls(&certificate, &mock).await;
    for (authority, is_used) in [
        (None, false),
        (other.file("cert.pem"), false),
        (certificate.file("cert.pem"), true),
    ] {
        let server = Server::bind(Config {
            port: 0,
            workers: vec![over_tls(&inner)],
            worker_ca_file: authority,
            ..Config::default()
        })
        .await
        .expect("binds");
        let fleet = server.fleet();
        let serving = tokio::spawn(server.serve(std::future::pending()));
        if is_used {
            until("it is up", || fleet.snapshot()[0].healthy).await;
        } else {
            tokio::time::sleep(Duration::from_millis(700)).await;
            assert!(!fleet.snapshot()[0].healthy);
        }
        serving.abort();
    }
}

#[tokio::test]
async fn a_certificate_that_is_none_is_named_at_the_start() {
    let certificate = Certificate::new();
    let (cert, key) = (certificate.file("cert.pem"), certificate.file("key.pem"));
    let none = certificate.file("none.pem");
    for (config, expected) in [
        (
            Config {
                tls_cert_file: cert.clone(),
                ..Config::default()
            },
            "one needs the other",
        ),
        (
            Config {
                tls_cert_file: none.clone(),
                tls_key_file: key.clone(),
                ..Config::default()
            },
            "tls_cert_file: ",
        ),
        (
            Config {
                tls_cert_file: cert.clone(),
                tls_key_file: cert.clone(),
                ..Config::default()
            },
            "tls_key_file: ",
        ),
        (
            Config {
                worker_ca_file: key.clone(),
                ..Config::default()
            },
            "holds no certificate",
        ),
    ] {
        let config = Config { port: 0, ..config };
        let error = Server::bind(config).await.err().expect("refused");
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
}
