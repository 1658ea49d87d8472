//! What engines say of themselves, without their secrets: SGLang's `/server_info` has every argument that it was
//! started with.

use bytes::Bytes;
use serde_json::Value;

const HIDDEN: &str = "***";
/// Names of secrets end so, or contain one of these.
const ENDS: [&str; 6] = ["key", "keys", "token", "tokens", "auth", "authorization"];
const PARTS: [&str; 6] = [
    "secret",
    "passw",
    "passphrase",
    "credential",
    "api_key",
    "private_key",
];
/// Of these words a tokenizer's names are made.
const TEXTS: [&str; 8] = ["eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop"];

/// The JSON without secrets; none where it is no JSON.
pub(super) fn without_secrets(body: &[u8]) -> Option<Bytes> {
    let mut value: Value = serde_json::from_slice(body).ok()?;
    redact(&mut value);
    serde_json::to_vec(&value).ok().map(Bytes::from)
}

fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match is_secret(name) {
                    true => hide(value),
                    false => redact(value),
                }
            }
        }
        Value::Array(items) => {
            // A command line has a secret behind its flag.
            let mut hides_next = false;
            for item in items {
                let follows = std::mem::take(&mut hides_next);
                if let Value::String(text) = item {
                    let (flag, given) = text.split_once('=').unwrap_or((text, ""));
                    let is_flag = flag.starts_with("--") && is_secret(flag);
                    hides_next = is_flag && given.is_empty() && !text.contains('=');
                    if is_flag && !given.is_empty() {
                        *text = format!("{flag}={HIDDEN}");
                        continue;
                    }
                }
                match follows {
                    true => hide(item),
                    false => redact(item),
                }
            }
        }
        Value::String(text) => {
            if let Some(shown) = inner(text) {
                *text = shown;
                return;
            }
            *text = without_bearers(text);
            if let Some(shown) = without_password(text) {
                *text = shown;
            } else if text.contains("--") {
                *text = without_flags(text);
            }
        }
        _ => {}
    }
}

/// Hides texts, wherever in it; numbers and words such as true are no secrets.
fn hide(value: &mut Value) {
    match value {
        Value::String(text) if !text.is_empty() => HIDDEN.clone_into(text),
        Value::Array(items) => items.iter_mut().for_each(hide),
        Value::Object(fields) => fields.values_mut().for_each(hide),
        _ => {}
    }
}

fn is_secret(name: &str) -> bool {
    let name = name
        .trim_start_matches('-')
        .to_ascii_lowercase()
        .replace('-', "_");
    let mut words = name.rsplit('_');
    let last = words.next().unwrap_or_default();
    let of_text = words.next().is_some_and(|word| TEXTS.contains(&word));
    let ends = ENDS.contains(&last) || last.ends_with("apikey");
    (ends && !of_text) || PARTS.iter().any(|part| name.contains(part))
}

/// JSON in a text, as some of SGLang's arguments are, without secrets.
fn inner(text: &str) -> Option<String> {
    let is_one = text.trim_start().starts_with(['{', '[']);
    let mut value: Value = serde_json::from_str(text).ok().filter(|_| is_one)?;
    redact(&mut value);
    Some(value.to_string())
}

/// A text without what stands behind `Bearer` and `Basic` in it.
fn without_bearers(text: &str) -> String {
    let mut hides_next = false;
    let words = text.split(' ').map(|word| {
        let scheme = word.rsplit(['=', ':', '"', '\'']).next().unwrap_or(word);
        let follows = std::mem::replace(
            &mut hides_next,
            ["bearer", "basic"]
                .iter()
                .any(|it| scheme.eq_ignore_ascii_case(it)),
        );
        if follows { HIDDEN } else { word }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// A URL without the password in it, and without what its query is signed with.
fn without_password(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let end = rest.find(['/', '?', '#', ' ']).unwrap_or(rest.len());
    let (begin, tail) = rest.split_at(end);
    let host = begin.rsplit_once('@').map(|(_, host)| host);
    let query = tail.split_once('?');
    let shown = query.map(|(path, query)| {
        let (query, fragment) = query.split_once('#').unwrap_or((query, ""));
        let parts = query.split('&').map(|part| match part.split_once('=') {
            Some((name, _)) if is_secret(name) || name.to_ascii_lowercase().contains("sig") => {
                format!("{name}={HIDDEN}")
            }
            _ => part.to_owned(),
        });
        let mark = if fragment.is_empty() { "" } else { "#" };
        format!(
            "{path}?{}{mark}{fragment}",
            parts.collect::<Vec<_>>().join("&")
        )
    });
    if host.is_none() && shown.as_deref().is_none_or(|shown| shown == tail) {
        return None;
    }
    let host = host.map_or_else(|| begin.to_owned(), |host| format!("{HIDDEN}@{host}"));
    Some(format!(
        "{scheme}://{host}{}",
        shown.as_deref().unwrap_or(tail)
    ))
}

/// A command line in one text, without the values of its secret flags.
fn without_flags(text: &str) -> String {
    let mut hides_next = false;
    let words = text.split(' ').map(|word| {
        if std::mem::take(&mut hides_next) {
            return HIDDEN.to_owned();
        }
        let (flag, given) = word.split_once('=').unwrap_or((word, ""));
        if !flag.starts_with("--") || !is_secret(flag) {
            return word.to_owned();
        }
        hides_next = given.is_empty();
        match hides_next {
            true => word.to_owned(),
            false => format!("{flag}={HIDDEN}"),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn secrets_are_hidden_by_their_kind_wherever_they_stand() {
        let info = json!({
            "api_key": "s1", "admin_api_key": "s1", "hf_token": "s1", "ssl_keyfile_password": "s1",
            "storage": {"aws_secret_access_key": "s1", "credentials": {"user": "s1"}, "kind": "nixl"},
            "argv": ["--api-key", "s1", "--model", "m", "--hf-token=s1", "--port", "8000"],
            "command": "serve m --admin-api-key s1 --port 9 --api-key=s1",
            "backend": "redis://user:s1@cache:6379/0", "proxy_authorization": "s1",
            "X-API-Key": "s1", "apiKey": "s1", "auth": ["s1"],
            "hicache_storage_backend_extra_config": r#"{"tp": 8000, "secret_access_key": "s1"}"#,
            "otlp_traces_headers": "Authorization: Bearer s1", "header": "authorization=Basic s1",
            "model_path": "https://h/--model?X-Amz-Signature=s1&sig=s1&part=8000#nixl",
        });
        let shown = without_secrets(info.to_string().as_bytes()).expect("JSON");
        let text = String::from_utf8_lossy(&shown);
        assert!(!text.contains("s1"), "{text}");
        for kept in ["nixl", "--model", "8000", "cache:6379"] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
    }

    #[test]
    fn what_is_no_secret_stays_as_it_is() {
        let info = json!({
            "max_total_num_tokens": 1000, "tokenizer_path": "p", "eos_token": "</s>", "page_size": 1,
            "api_key": null, "model_path": "a/b", "url": "http://h:1/x@y", "skip_tokenizer_init": true,
            "stop_tokens": ["x"], "note": "a -- b",
        });
        let shown = without_secrets(info.to_string().as_bytes()).expect("JSON");
        let shown: Value = serde_json::from_slice(&shown).expect("JSON");
        assert_eq!(shown, info);
        assert_eq!(without_secrets(b"not JSON"), None);
    }
}
