//! Prefixes that stay: what changes from session to session, or in mid-conversation, in front of what is the same
//! would have engines compute all of it again. It is normalised by a rule each, which `normalise_prompts = false`
//! switches off. What a user wrote is never touched, and the rest of a body goes on byte for byte.

use super::cursor::{Cursor, Malformed};
use memchr::memmem::Finder;
use serde::Deserialize;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

/// The rules, and what each does.
pub(super) const RULES: [(&str, &str); 2] = [
    (
        ATTRIBUTION,
        "Claude Code's line of attribution in front of its system prompt is left out",
    ),
    (
        LATER_SYSTEMS,
        "before vLLM, system messages in the midst of a conversation of /v1/messages are sent as user messages",
    ),
];
pub(super) const ATTRIBUTION: &str = "claude_code_attribution";
pub(super) const LATER_SYSTEMS: &str = "later_system_messages";

/// How the line begins. It names the client's version with a hash of the session's first message.
const LINE: &str = "x-anthropic-billing-header:";
/// Longer blocks hold more than the line.
const MAX_LINE_BYTES: usize = 512;
/// Made once: to make it takes longer than to look for the line.
static FINDER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(LINE));

/// Where a `system` in blocks has the line as its first one, with the comma behind it. vLLM (0.26.0) leaves it out
/// itself, SGLang (0.5.23) does not.
pub(super) fn attribution(system: &[u8]) -> Option<Range<usize>> {
    #[derive(Deserialize)]
    struct Block<'a> {
        #[serde(borrow)]
        text: Cow<'a, str>,
    }
    let mut cursor = Cursor {
        bytes: system,
        at: 0,
        run: None,
        long: Vec::new(),
    };
    cursor.take(b'[', "a list").ok()?;
    cursor.peek()?;
    let start = cursor.at;
    let begin = &system[start..system.len().min(start + MAX_LINE_BYTES)];
    FINDER.find(begin)?;
    let block = cursor.value().ok()?;
    if block.len() > MAX_LINE_BYTES {
        return None;
    }
    let block: Block<'_> = serde_json::from_slice(block).ok()?;
    if !block.text.starts_with(LINE) || block.text.trim_end().contains('\n') {
        return None;
    }
    cursor.take(b',', "another block").ok()?;
    cursor.peek()?;
    Some(start..cursor.at)
}

/// A body of `/v1/messages` whose system messages behind others are user messages; none where it has none. vLLM
/// (0.26.0) moves them to the front, so that the whole prompt is another with each.
pub(super) fn later_systems(body: &[u8]) -> Option<Vec<u8>> {
    const SYSTEM: &[u8] = b"\"system\"";
    let has = |mark: &[u8]| memchr::memmem::find(body, mark).is_some();
    if !has(b":\"system\"") && !has(b": \"system\"") {
        return None;
    }
    let mut roles: Vec<Range<usize>> = Vec::new();
    let mut cursor = Cursor {
        bytes: body,
        at: 0,
        run: None,
        long: Vec::new(),
    };
    let read = cursor.object(|cursor, key| {
        if key != b"messages" || cursor.peek() != Some(b'[') {
            cursor.value()?;
            return Ok(());
        }
        roles.clear();
        let mut is_later = false;
        cursor.array(|cursor| {
            let mut is_system = false;
            let message = |cursor: &mut Cursor<'_>, key: &[u8]| -> Result<(), Malformed> {
                cursor.peek();
                let start = cursor.at;
                let is_role = key == b"role";
                if cursor.value()? == SYSTEM && is_role {
                    is_system = true;
                    if is_later {
                        roles.push(start..cursor.at);
                    }
                }
                Ok(())
            };
            cursor.object(message)?;
            is_later |= !is_system;
            Ok(())
        })
    });
    read.ok()?;
    let mut changed = Vec::with_capacity(body.len());
    let mut copied = 0;
    for role in &roles {
        changed.extend_from_slice(&body[copied..role.start]);
        changed.extend_from_slice(b"\"user\"");
        copied = role.end;
    }
    changed.extend_from_slice(&body[copied..]);
    (!roles.is_empty()).then_some(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn the_line_of_attribution_is_found_as_the_first_of_several_blocks_alone() {
        let line = json!({"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"});
        let rest =
            json!({"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}});
        let text = json!([line, rest]).to_string();
        let cut = attribution(text.as_bytes()).expect("found");
        let left = [&text[..cut.start], &text[cut.end..]].concat();
        assert_eq!(left, json!([rest]).to_string());
        let spaced = " [ {\"text\": \"x-anthropic-billing-header: a\"} , {\"text\": \"b\"} ]";
        let cut = attribution(spaced.as_bytes()).expect("found");
        assert_eq!(
            [&spaced[..cut.start], &spaced[cut.end..]].concat(),
            " [ {\"text\": \"b\"} ]"
        );
        for other in [
            json!([line]),
            json!([rest, line]),
            json!("x-anthropic-billing-header: a"),
            json!([{"type": "text", "text": "x-anthropic-billing-header: a\nand more"}, rest]),
            json!([]),
            json!(null),
        ] {
            assert_eq!(attribution(other.to_string().as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn system_messages_behind_others_become_user_messages() {
        let turn = |role: &str, text: &str| json!({"role": role, "content": text});
        let body = json!({"system": "s", "messages": [
            turn("system", "first"), turn("user", "say \"role\":\"system\""), turn("assistant", "a"),
            turn("system", "reminder"), turn("user", "b"),
        ], "stream": true});
        let changed = later_systems(body.to_string().as_bytes()).expect("changed");
        let changed: Value = serde_json::from_slice(&changed).expect("JSON");
        let mut expected = body;
        expected["messages"][3]["role"] = "user".into();
        assert_eq!(changed, expected);
        for body in [
            json!({"system": "s", "messages": [turn("system", "first"), turn("user", "b")]}),
            json!({"messages": [turn("user", ": \"system\"")]}),
            json!({"messages": "\":\"system\""}),
        ] {
            assert_eq!(later_systems(body.to_string().as_bytes()), None, "{body}");
        }
    }
}
