//! Why a worker cannot be asked, in words that tell one cause from another.

use super::describe;
use hyper_util::client::legacy;
use std::error::Error;
use std::io::ErrorKind;
use tokio_rustls::rustls;

/// What stands in the way of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    pub words: String,
    /// Nothing listens there: it may not have started yet.
    pub is_refused: bool,
}

impl Reason {
    pub fn of(failure: legacy::Error) -> Self {
        let (mut tls, mut is_refused, mut is_name, mut is_http) = (None, false, false, false);
        let mut cause: Option<&(dyn Error + 'static)> = Some(&failure);
        while let Some(error) = cause {
            // As hyper-util calls a name that was not resolved.
            is_name |= error.to_string().starts_with("dns error");
            if let Some(error) = error.downcast_ref::<hyper::Error>() {
                is_http |= error.is_parse();
            }
            if let Some(error) = error.downcast_ref::<std::io::Error>() {
                is_refused |= error.kind() == ErrorKind::ConnectionRefused;
            }
            tls = tls.or_else(|| tls_in(error));
            cause = error.source();
        }
        let said = describe(failure);
        let words = match tls {
            _ if is_name => format!("its name is not resolved: {said}"),
            Some(error) => format!("TLS: {error}{}", advice(&error)),
            None if is_refused => "it refuses connections: nothing listens there".to_owned(),
            None if is_http => {
                format!("its answer is no HTTP (does it speak TLS: https:// in its url?): {said}")
            }
            None => said,
        };
        Self { words, is_refused }
    }
}

/// The error of TLS that this is. One in an error of input and output is none of its sources.
fn tls_in(error: &(dyn Error + 'static)) -> Option<rustls::Error> {
    if let Some(error) = error.downcast_ref::<rustls::Error>() {
        return Some(error.clone());
    }
    let inner = error.downcast_ref::<std::io::Error>()?.get_ref()?;
    tls_in(inner)
}

/// What to do about it, where that does not follow from the error.
fn advice(error: &rustls::Error) -> &'static str {
    use rustls::{CertificateError, Error};
    match error {
        Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            " (worker_ca_file names the authorities that are trusted)"
        }
        Error::InvalidCertificate(CertificateError::Other(_)) => {
            " (an authority's own certificate is none of a server: give the worker one with CA:FALSE)"
        }
        Error::InvalidMessage(_) => " (it does not speak TLS: http:// in its url?)",
        _ => "",
    }
}
