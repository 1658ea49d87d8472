//! TLS on both sides: of clients' connections with the router's certificate, of connections to workers
//! whose URL begins with `https`. rustls, with ring.

use super::resolve::Connector;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::Arc;
use tokio_rustls::TlsAcceptor;

/// What takes TLS connections of clients that speak `protocol`. `certificates` is the router's own and those up to an authority
/// that clients know, `key` its private key, both PEM.
///
/// # Errors
/// One line that names the field and the file.
pub(super) fn acceptor(
    certificates: &Path,
    key: &Path,
    protocol: &str,
) -> Result<TlsAcceptor, String> {
    let chain = read_certificates("tls_cert_file", certificates)?;
    let key = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("tls_key_file: {}: {error}", key.display()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| format!("tls_cert_file, tls_key_file: {error}"))?;
    config.alpn_protocols = vec![protocol.into()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// `http` for URLs of both kinds. Workers' certificates are those of `authorities` (PEM) alone, or
/// without it of the authorities that this machine trusts.
///
/// # Errors
/// One line that names the field and the file.
pub(super) fn connector(
    mut http: Connector,
    authorities: Option<&Path>,
) -> Result<HttpsConnector<Connector>, String> {
    let mut roots = RootCertStore::empty();
    match authorities {
        Some(file) => {
            for certificate in read_certificates("worker_ca_file", file)? {
                roots
                    .add(certificate)
                    .map_err(|error| format!("worker_ca_file: {}: {error}", file.display()))?;
            }
        }
        None => {
            let trusted = rustls_native_certs::load_native_certs();
            for error in trusted.errors {
                log::debug!("the machine's certificates: {error}");
            }
            roots.add_parsable_certificates(trusted.certs);
        }
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_no_client_auth();
    http.enforce_http(false);
    Ok(HttpsConnectorBuilder::new()
        .with_tls_config(config)
        .https_or_http()
        .enable_http1()
        .wrap_connector(http))
}

fn read_certificates(field: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| format!("{field}: {}: {error}", file.display()))?;
    if certificates.is_empty() {
        return Err(format!("{field}: {}: holds no certificate", file.display()));
    }
    Ok(certificates)
}
