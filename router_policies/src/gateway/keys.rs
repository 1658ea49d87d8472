//! Who may ask: the API keys of clients and the admin's token.
//!
//! Without keys everybody who reaches the router may. With some, whatever reaches a model needs one, as
//! `Authorization: Bearer` or, as Anthropic's clients send it, `x-api-key`. What tells of workers and
//! decisions needs the admin's token where there is one, else a key; health needs neither.

use super::Gateway;
use crate::config::Config;
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName};
use parking_lot::{Mutex, RwLock};
use std::ffi::OsStr;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::{Duration, SystemTime};

/// Keys, separated by commas or white space, besides those in `api_keys_file`.
const VARIABLE: &str = "DELTASERVE_API_KEYS";
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// What a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// A model's answer, or to know of the model.
    Model,
    /// To know of the workers, the decisions and the engines' settings.
    Inside,
    /// To count: metrics name workers, and nothing of what is asked.
    Metrics,
}

/// Why a request is refused: status, kind and message.
pub(super) type NotAllowed = (StatusCode, &'static str, &'static str);

/// What clients and the admin know.
pub(crate) struct Keys {
    keys: RwLock<Vec<String>>,
    /// Tenants' keys, and whose they are.
    of_tenants: Vec<(String, usize)>,
    /// The header that names a tenant, and their names.
    names: Option<(HeaderName, Vec<String>)>,
    are_needed: bool,
    admin_token: Option<String>,
    file: Option<PathBuf>,
    /// Of the file when it was last read.
    stamp: Mutex<Option<Stamp>>,
    hasher: RandomState,
}

type Stamp = (SystemTime, u64);

/// How often the file of keys is looked at.
const LOOK: Duration = Duration::from_secs(2);

/// Has the file of keys read again whenever it changes.
pub(super) async fn watch(gateway: Weak<Gateway>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(gateway) = gateway.upgrade() else {
            return;
        };
        let keys = &gateway.keys;
        if keys.file.as_deref().and_then(stamp_of) != *keys.stamp.lock() {
            keys.reload();
        }
    }
}

fn stamp_of(file: &Path) -> Option<Stamp> {
    let data = std::fs::metadata(file).ok()?;
    Some((data.modified().ok()?, data.len()))
}

impl Keys {
    /// The keys of the configuration and of the environment.
    ///
    /// # Errors
    /// One line that names the file and the line, or the variable.
    pub fn load(config: &Config) -> Result<Self, String> {
        let file = config.api_keys_file.clone();
        let stamp = file.as_deref().and_then(stamp_of);
        let keys = read(file.as_deref())?;
        let names = config.tenant_names();
        let of_tenants = names.iter().enumerate().flat_map(|(payer, name)| {
            let keys = config.tenants.get(*name).map_or(&[][..], |of| &of.keys);
            keys.iter().map(move |key| (key.as_str().to_owned(), payer))
        });
        let of_tenants: Vec<_> = of_tenants.collect();
        let header = config.tenant_header.as_deref();
        let header = header.and_then(|name| name.parse().ok());
        Ok(Self {
            are_needed: !keys.is_empty() || !of_tenants.is_empty(),
            of_tenants,
            names: header.map(|header| (header, names.into_iter().map(str::to_owned).collect())),
            keys: RwLock::new(keys),
            admin_token: config.admin_token.clone(),
            file,
            stamp: Mutex::new(stamp),
            hasher: RandomState::new(),
        })
    }

    /// Reads the file again. Where it cannot be read the keys stay as they are: no mistake in it opens the
    /// router, or closes it to all.
    pub fn reload(&self) {
        let Some(file) = &self.file else { return };
        *self.stamp.lock() = stamp_of(file);
        match read(Some(file)) {
            Ok(keys) => {
                log::info!("api_keys_file: {} keys", keys.len());
                *self.keys.write() = keys;
            }
            Err(error) => log::warn!("{error}; the keys read before stay"),
        }
    }

    /// A number for who asks: its tenant where clients need a key, else by its address. None on this machine, where
    /// a proxy may ask for everybody.
    pub fn owner(&self, tenant: u64, address: Option<IpAddr>) -> Option<u64> {
        if self.are_needed {
            return Some(tenant);
        }
        let network = match address?.to_canonical() {
            address if address.is_loopback() => return None,
            IpAddr::V4(address) => u64::from(address.to_bits()),
            // A host of IPv6 has all addresses of its network.
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        };
        Some(self.hasher.hash_one(network))
    }

    /// Whether clients need a key. What they send as one is then not for the workers.
    pub fn are_needed(&self) -> bool {
        self.are_needed
    }

    /// Why a request with these headers does not get what it wants, if so.
    pub(super) fn refusal(&self, headers: &HeaderMap, wants: Wants) -> Option<NotAllowed> {
        if wants == Wants::Model && !self.are_needed() {
            return None;
        }
        let token = bearer(headers);
        let is_admin = |token: &[u8]| {
            let admin = self.admin_token.as_deref();
            admin.is_some_and(|admin| is_same(token, admin.as_bytes()))
        };
        if token.is_some_and(is_admin) {
            return None;
        }
        let needs_admin = wants == Wants::Inside && self.admin_token.is_some();
        if needs_admin {
            return Some((
                StatusCode::UNAUTHORIZED,
                "authentication_error",
                "this needs the admin token as Authorization: Bearer",
            ));
        }
        let key = headers.get(&API_KEY).map(|value| value.as_bytes());
        let is_known = [token, key]
            .into_iter()
            .flatten()
            .any(|key| self.knows(key));
        (self.are_needed() && !is_known).then_some((
            StatusCode::UNAUTHORIZED,
            "authentication_error",
            "expected an API key of this router as Authorization: Bearer or x-api-key",
        ))
    }

    /// Whose share a request takes: a place in the list of tenants, by its header or by its key.
    pub fn payer(&self, headers: &HeaderMap) -> usize {
        if let Some((header, names)) = &self.names
            && let Some(given) = headers.get(header)
        {
            let named = |name: &String| name.as_bytes() == given.as_bytes();
            return names.iter().position(named).unwrap_or(0);
        }
        let given = self.given(headers);
        self.of_tenants.iter().fold(0, |found, (key, payer)| {
            let mut given = given.into_iter().flatten();
            match given.any(|given| is_same(given, key.as_bytes())) {
                true => *payer,
                false => found,
            }
        })
    }

    fn given<'a>(&self, headers: &'a HeaderMap) -> [Option<&'a [u8]>; 2] {
        let key = headers.get(&API_KEY).map(|value| value.as_bytes());
        [bearer(headers), key]
    }

    /// Whose a request is: a number for each key, 0 where nobody needs one. Sessions' ids are those of their tenant.
    pub fn tenant(&self, headers: &HeaderMap) -> u64 {
        // Behind one key of a gateway there are many tenants.
        let named = match &self.names {
            Some(_) => self.payer(headers),
            None => 0,
        };
        if !self.are_needed() {
            return match named {
                0 => 0,
                named => self.hasher.hash_one(named) | 1,
            };
        }
        let given = self.given(headers);
        let keys = self.keys.read();
        let of_tenants = self.of_tenants.iter().map(|(key, _)| key);
        keys.iter().chain(of_tenants).fold(0, |found, key| {
            let mut given = given.into_iter().flatten();
            match given.any(|given| is_same(given, key.as_bytes())) {
                // Its place in the file may change.
                true => self.hasher.hash_one((key, named)) | 1,
                false => found,
            }
        })
    }

    /// Looks at all keys, so that the time taken does not say which one is alike.
    fn knows(&self, given: &[u8]) -> bool {
        let keys = self.keys.read();
        let of_tenants = self.of_tenants.iter().map(|(key, _)| key);
        let all = keys.iter().chain(of_tenants);
        all.fold(false, |found, key| found | is_same(given, key.as_bytes()))
    }
}

/// Takes the client's key out of the headers that go to a worker.
pub(super) fn remove(headers: &mut HeaderMap) {
    headers.remove(AUTHORIZATION);
    headers.remove(API_KEY);
}

/// What a request has as `Authorization: Bearer`.
pub(super) fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let given = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = given.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// Compares all bytes, so that the time taken says nothing of where they differ; only of the length.
pub(super) fn is_same(given: &[u8], expected: &[u8]) -> bool {
    given.len() == expected.len()
        && given
            .iter()
            .zip(expected)
            .fold(0, |difference, (a, b)| difference | (a ^ b))
            == 0
}

/// The keys of the file, if there is one, and of the environment.
fn read(file: Option<&Path>) -> Result<Vec<String>, String> {
    let mut keys = file.map_or(Ok(Vec::new()), from_file)?;
    if let Some(text) = std::env::var_os(VARIABLE) {
        keys.extend(from_variable(&text).map_err(|error| format!("{VARIABLE}: {error}"))?);
    }
    Ok(keys)
}

fn from_file(path: &Path) -> Result<Vec<String>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("api_keys_file: {shown}: {error}"))?;
    let mut keys = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let key = line.trim();
        if key.is_empty() || key.starts_with('#') {
            continue;
        }
        let number = number + 1;
        check(key).map_err(|error| format!("api_keys_file: {shown}:{number}: {error}"))?;
        keys.push(key.to_owned());
    }
    if keys.is_empty() {
        // Who names a file means that keys are needed.
        return Err(format!(
            "api_keys_file: {shown}: expected a key a line, found none"
        ));
    }
    Ok(keys)
}

/// The keys in the variable's text. Who sets it means that keys are needed, so that one without any,
/// as an empty secret leaves it, does not open the router to everybody.
fn from_variable(text: &OsStr) -> Result<Vec<String>, String> {
    let text = text.to_string_lossy(); // what is lost is no part of a key: `check` says so
    let words = text
        .split([',', ' ', '\t', '\n'])
        .filter(|key| !key.is_empty());
    let keys = words
        .map(|key| check(key).map(|()| key.to_owned()))
        .collect::<Result<Vec<_>, _>>()?;
    if keys.is_empty() {
        return Err(
            "expected keys, separated by commas, found none (unset it where everybody may ask)"
                .to_owned(),
        );
    }
    Ok(keys)
}

/// A key has to fit into a header; the error does not repeat it.
fn check(key: &str) -> Result<(), String> {
    const BYTES: std::ops::RangeInclusive<usize> = 8..=512;
    let is_plain = key.bytes().all(|byte| byte.is_ascii_graphic());
    if BYTES.contains(&key.len()) && is_plain {
        return Ok(());
    }
    let (least, most) = BYTES.into_inner();
    Err(format!(
        "expected a key of {least} to {most} printable characters without spaces"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;
    use std::os::unix::ffi::OsStrExt;

    fn keys(keys: &[&str], admin: Option<&str>) -> Keys {
        Keys {
            keys: RwLock::new(keys.iter().map(|&key| key.to_owned()).collect()),
            of_tenants: Vec::new(),
            names: None,
            are_needed: !keys.is_empty(),
            admin_token: admin.map(str::to_owned),
            file: None,
            stamp: Mutex::default(),
            hasher: RandomState::new(),
        }
    }

    fn with(name: &'static str, value: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        headers
    }

    #[test]
    fn without_keys_a_share_is_that_of_an_address_or_of_a_network_of_ipv6() {
        let keys = keys(&[], None);
        let owner = |address: &str| keys.owner(0, address.parse().ok());
        assert_eq!((owner("127.0.0.1"), owner("::1")), (None, None));
        assert_eq!(owner("::ffff:127.0.0.1"), None);
        assert_eq!(owner("10.0.0.1"), owner("::ffff:10.0.0.1"));
        assert_ne!(owner("10.0.0.1"), owner("10.0.0.2"));
        assert_eq!(owner("2001:db8::1"), owner("2001:db8::2"));
        assert_ne!(owner("2001:db8::1"), owner("2001:db8:0:1::1"));
    }

    #[test]
    fn a_model_needs_a_key_where_there_are_some() {
        let none = keys(&[], None);
        assert_eq!(none.refusal(&HeaderMap::new(), Wants::Model), None);
        let two = keys(&["key-one-1", "key-two-2"], Some("the-admin"));
        for (headers, may) in [
            (HeaderMap::new(), false),
            (with("authorization", "Bearer key-two-2"), true),
            (with("authorization", "bearer key-one-1"), true),
            (with("authorization", "Basic key-one-1"), false),
            (with("authorization", "Bearer key-two-"), false),
            (with("authorization", "Bearer key-two-22"), false),
            (with("authorization", "Bearer "), false),
            (with("x-api-key", "key-one-1"), true),
            (with("x-api-key", "the-admin"), false),
            (with("authorization", "Bearer the-admin"), true),
        ] {
            let refusal = two.refusal(&headers, Wants::Model);
            assert_eq!(refusal.is_none(), may, "{headers:?}");
        }
    }

    #[test]
    fn one_key_is_one_owner_whatever_else_its_client_sends() {
        let two = keys(&["key-one-1", "key-two-2"], None);
        let owner = |headers: &HeaderMap| two.owner(two.tenant(headers), None);
        let mut disguised = with("x-api-key", "key-one-1");
        disguised.insert(AUTHORIZATION, HeaderValue::from_static("Bearer another"));
        assert_eq!(owner(&disguised), owner(&with("x-api-key", "key-one-1")));
        assert_ne!(owner(&disguised), owner(&with("x-api-key", "key-two-2")));
    }

    #[test]
    fn what_is_inside_is_the_admins_where_there_is_one() {
        let key = with("x-api-key", "key-one-1");
        let admin = with("authorization", "Bearer the-admin");
        let both = keys(&["key-one-1"], Some("the-admin"));
        assert!(both.refusal(&key, Wants::Inside).is_some());
        assert!(both.refusal(&key, Wants::Metrics).is_none());
        assert!(both.refusal(&admin, Wants::Inside).is_none());
        assert!(both.refusal(&HeaderMap::new(), Wants::Metrics).is_some());
        let without_admin = keys(&["key-one-1"], None);
        assert!(without_admin.refusal(&key, Wants::Inside).is_none());
        let without_keys = keys(&[], Some("the-admin"));
        assert!(
            without_keys
                .refusal(&HeaderMap::new(), Wants::Inside)
                .is_some()
        );
        assert!(
            without_keys
                .refusal(&HeaderMap::new(), Wants::Metrics)
                .is_none()
        );
    }

    #[test]
    fn a_variable_that_is_set_has_a_key() {
        let found = |text: &[u8]| from_variable(OsStr::from_bytes(text));
        assert_eq!(
            found(b"key-one-1, key-two-2,\n").expect("two"),
            ["key-one-1", "key-two-2"]
        );
        for (text, expected) in [
            (&b""[..], "found none"),
            (b",", "found none"),
            (b" ,\t\n", "found none"),
            (b"key-one-1,short", "expected a key of 8"),
            (b"key-one-\xff", "expected a key of 8"),
        ] {
            let error = found(text).expect_err("no keys");
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_line_and_not_the_key() {
        let path = std::env::temp_dir().join(format!("router-keys-{:x}", fastrand::u64(..)));
        for (text, expected) in [
            ("# none\n", "expected a key a line"),
            ("\nshort\n", ":2: expected a key of 8"),
            ("a-key with-a-space\n", ":1: expected a key"),
        ] {
            std::fs::write(&path, text).expect("written");
            let error = from_file(&path).expect_err(text);
            assert!(error.contains(expected), "{error}");
            assert!(
                !error.contains("short") && !error.contains("with-a"),
                "{error}"
            );
        }
        std::fs::write(&path, "# a team\nkey-one-1\n\n  key-two-2\n").expect("written");
        assert_eq!(from_file(&path).expect("two"), ["key-one-1", "key-two-2"]);
        std::fs::remove_file(&path).expect("removed");
    }
}
