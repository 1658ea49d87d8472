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

/// A URL without the password in it.
fn without_password(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let end = rest.find(['/', '?', '#', ' ']).unwrap_or(rest.len());
    let (user, _) = rest[..end].rsplit_once('@')?;
    Some(format!("{scheme}://{HIDDEN}{}", &rest[user.len()..]))
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
