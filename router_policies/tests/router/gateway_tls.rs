//! TLS between clients and the router, and between the router and its workers.

use crate::mock::router::{Router, generate, until};
use crate::mock::{MockWorker, logged};
use router_policies::config::{Config, WorkerSpec};
use router_policies::gateway::Server;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

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

/// The address of a worker that speaks TLS: what comes over it goes on to a mock.
async fn over_tls(certificate: &Certificate, mock: &MockWorker) -> WorkerSpec {
    let chain = CertificateDer::from_pem_file(certificate.folder.join("cert.pem")).expect("PEM");
    let key = PrivateKeyDer::from_pem_file(certificate.folder.join("key.pem")).expect("PEM");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![chain], key)
        .expect("a certificate");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("https://{}", listener.local_addr().expect("bound"));
    let to = mock.url.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (acceptor, to) = (acceptor.clone(), to.clone());
            tokio::spawn(async move {
                let worker = TcpStream::connect(to).await;
                if let (Ok(mut client), Ok(mut worker)) = (acceptor.accept(socket).await, worker) {
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut worker).await;
                }
            });
        }
    });
    serde_json::from_value(json!({"url": url, "id": "secure"})).expect("a worker")
}

/// What a router that speaks TLS answers to a request over it.
async fn ask_over_tls(certificate: &Certificate, router: &Router, request: &str) -> String {
    let mut roots = RootCertStore::empty();
    let root = CertificateDer::from_pem_file(certificate.folder.join("cert.pem")).expect("PEM");
    roots.add(root).expect("a certificate");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let address = router.url.trim_start_matches("http://");
    let socket = TcpStream::connect(address).await.expect("a connection");
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    let connector = TlsConnector::from(Arc::new(config));
    let mut socket = connector.connect(name, socket).await.expect("TLS");
    socket.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_request_goes_over_tls_on_both_sides() {
    let certificate = Certificate::new();
    let mock = MockWorker::start().await;
    let router = Router::with(Config {
        workers: vec![over_tls(&certificate, &mock).await],
        worker_ca_file: certificate.file("cert.pem"),
        tls_cert_file: certificate.file("cert.pem"),
        tls_key_file: certificate.file("key.pem"),
        ..Config::default()
    })
    .await;
    let body = generate(true).to_string();
    let request = format!(
        "POST /generate HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    // Who speaks no TLS is not answered, and takes nothing from others.
    for _ in 0..2 {
        let answer = ask_over_tls(&certificate, &router, &request).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("x-deltaserve-worker: secure"), "{answer}");
        assert!(answer.contains("[DONE]"), "{answer}");
        let plain = hyper::Request::get(format!("{}/health", router.url));
        let plain = plain.body(http_body_util::Full::default());
        let plain = plain.expect("a request");
        assert!(router.client.request(plain).await.is_err());
    }
    assert_eq!(mock.bodies().len(), 2);
}

#[tokio::test]
async fn a_worker_whose_certificate_nobody_vouches_for_is_not_used() {
    let certificate = Certificate::new();
    let other = Certificate::new();
    let mock = MockWorker::start().await;
    let secure = over_tls(&certificate, &mock).await;
    for (authority, is_used) in [
        (None, false),
        (other.file("cert.pem"), false),
        (certificate.file("cert.pem"), true),
    ] {
        let server = Server::bind(Config {
            port: 0,
            workers: vec![secure.clone()],
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
async fn what_stands_in_the_way_of_a_worker_is_named() {
    logged::begin();
    let certificate = Certificate::new();
    let (mock, plain, failing, hung) = (
        MockWorker::start().await,
        MockWorker::start().await,
        MockWorker::start().await,
        MockWorker::start().await,
    );
    failing.behaviour.healthy.store(false, Ordering::SeqCst);
    hung.behaviour.hangs.store(true, Ordering::SeqCst);
    let secure = over_tls(&certificate, &mock).await.url;
    let not_secure = plain.url.replace("http://", "https://");
    let no_tls = secure.replace("https://", "http://");
    let name = fastrand::u64(..);
    for (at, (url, expected, may_start)) in [
        (secure.as_str(), "TLS: ", false),
        (&not_secure, "does not speak TLS", false),
        (&no_tls, "", false),
        ("http://127.0.0.1:1", "refuses connections", true),
        (
            "http://no-such-host.invalid:80",
            "its name is not resolved",
            false,
        ),
        (&failing.url, "HTTP 503", false),
        (&hung.url, "no answer within", false),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("unreached-{name:x}-{at}");
        let config = Config {
            port: 0,
            workers: vec![serde_json::from_value(json!({"url": url, "id": id})).expect("a worker")],
            ..Config::default()
        };
        let checked = config.clone();
        let check =
            tokio::task::spawn_blocking(move || router_policies::gateway::check(checked, None));
        let found = check.await.expect("checked").expect("it would start");
        let [unreached] = &found[..] else {
            panic!("{url}: {} found", found.len())
        };
        assert!(
            unreached.words.contains(expected),
            "{url}: {}",
            unreached.words
        );
        assert_eq!(unreached.may_start, may_start, "{url}");
        if url == hung.url {
            // Its warning takes a minute.
            continue;
        }
        let server = Server::bind(config).await.expect("binds");
        let serving = tokio::spawn(server.serve(std::future::pending()));
        until("it is warned of", || !logged::lines_of(&id).is_empty()).await;
        let warned = logged::lines_of(&id);
        assert!(warned[0].contains(expected), "{url}: {warned:?}");
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
