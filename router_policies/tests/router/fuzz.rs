//! Fuzz targets: what comes from outside, mutated, against slow readers that are plainly right.
//!
//! `cargo test` runs each for ROUTER_FUZZ_SECONDS (2) with random input; `cargo bolero test --engine
//! libfuzzer TARGET` runs the same targets under libFuzzer, which needs a nightly compiler.

use bytes::Bytes;
use decision::fleet::prefix::events::{ExactIndex, decode};
use decision::fleet::prefix::hash::{PromptHashes, TokenHasher};
use router_policies::config::Engine;
use router_policies::gateway::SseProgress;
use router_policies::gateway::body::{Api, Scanner, scan};
use router_policies::gateway::splice::{bootstrap_fields, splice};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::time::Duration;

fn fuzz(target: impl Fn(&[u8]) + std::panic::RefUnwindSafe) {
    let seconds = std::env::var("ROUTER_FUZZ_SECONDS").ok();
    let seconds = seconds.and_then(|value| value.parse().ok()).unwrap_or(2);
    bolero::check!()
        .with_test_time(Duration::from_secs(seconds))
        .with_max_len(256)
        .for_each(|data: &[u8]| target(data));
}

/// Reads instructions out of the fuzzer's bytes.
struct Instructions<'a>(&'a [u8]);

impl Instructions<'_> {
    fn next(&mut self) -> Option<usize> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first.into())
    }

    /// A place in something of so many bytes.
    fn place(&mut self, length: usize) -> Option<usize> {
        let wide = self.next()? << 8 | self.next()?;
        wide.checked_rem(length)
    }
}

/// One of `seeds` with edits: cut, doubled, overwritten, spliced with another.
fn mutated(data: &[u8], seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut instructions = Instructions(data);
    let first = instructions.next().unwrap_or_default();
    let mut input = seeds[first % seeds.len()].clone();
    while let (Some(edit), Some(at)) = (instructions.next(), instructions.place(input.len())) {
        let length = 1 + edit / 8 % 16;
        let end = (at + length).min(input.len());
        match edit % 8 {
            0 => input.truncate(at),
            1 => drop(input.drain(at..end)),
            2 => input.extend_from_within(at..end),
            3 => {
                let other = &seeds[edit / 8 % seeds.len()];
                let from = at.min(other.len());
                input.splice(at..end, other[from..].iter().copied());
            }
            4 => input[at] ^= 1 << (edit / 8 % 8),
            5 => input.insert(at, b"{}[],:\" \\\n\r0"[edit / 8 % 12]),
            _ => {
                let byte = instructions.next().unwrap_or_default() as u8;
                input[at] = byte;
            }
        }
        if input.is_empty() || input.len() > 4_096 {
            break;
        }
    }
    input
}

/// A JSON object's members in their order, equal keys included.
struct Members(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array()?.iter();
    ids.map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn hashes(ids: &[u32]) -> PromptHashes {
    let mut hasher = TokenHasher::new(2);
    ids.iter().for_each(|&id| hasher.push(id));
    hasher.finish()
}

/// A text of JSON whose letters may be escaped.
fn quoted(text: &str, escaped: usize) -> String {
    let letter = |(at, letter): (usize, char)| match escaped >> (at % 8) & 1 {
        0 => letter.to_string(),
        _ => format!("\\u{:04x}", letter as u32),
    };
    let letters: String = text.chars().enumerate().map(letter).collect();
    format!("\"{letters}\"")
}

#[test]
fn no_body_tells_an_engine_where_kv_comes_from_or_goes_to() {
    const SGLANG: [&str; 6] = [
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
    ];
    const VLLM: [&str; 2] = ["kv_transfer_params", "ec_transfer_params"];
    const OTHERS: [&str; 5] = ["x", "model", "vllm_xargs", "kv_transfer_param", "top_k"];
    let names: Vec<&str> = SGLANG.into_iter().chain(VLLM).chain(OTHERS).collect();
    let values = [
        "null",
        "\"x\"",
        "{\"kv_transfer_params\":1}",
        "[1]",
        "1.5",
        "true",
        "{}",
    ];
    fuzz(move |data| {
        let mut instructions = Instructions(data);
        let mut pick = |most: usize| instructions.next().map(|it| it % most);
        let mut fields =
            vec![r#""prompt":[1],"input_ids":[1],"messages":[],"input":"x""#.to_owned()];
        while let (Some(at), Some(escapes), Some(kind)) = (pick(names.len()), pick(256), pick(12)) {
            let value = match kind {
                // An object of some of the names, as in `vllm_xargs`.
                7..12 => {
                    let inner = (7..=kind).filter_map(|_| {
                        let name = quoted(names[pick(names.len())?], pick(256)?);
                        Some(format!("{name} : {}", values[pick(values.len())?]))
                    });
                    format!("{{{}}}", inner.collect::<Vec<_>>().join(","))
                }
                _ => values[kind].to_owned(),
            };
            let name = if kind >= 7 && escapes % 2 == 0 {
                "vllm_xargs"
            } else {
                names[at]
            };
            fields.push(format!("{}: {value}", quoted(name, escapes)));
        }
        let body = Bytes::from(format!("{{{}}}", fields.join(", ")));
        let before: Value = serde_json::from_slice(&body).expect("JSON");
        for (engine, own) in [(Engine::Sglang, &SGLANG[..]), (Engine::Vllm, &VLLM[..])] {
            for api in Api::ALL {
                let scanned = scan(api, &body, 2, 16).expect("a prompt");
                let fields = scanned.overrides(engine).join(",");
                let sent = match fields.is_empty() {
                    true => body.to_vec(),
                    false => splice(&body, &scanned, fields).concat(),
                };
                let mut after: Value = serde_json::from_slice(&sent).expect("JSON");
                // What the engine reads: the last of equal keys.
                for name in own {
                    assert!(after.get(name).is_none_or(Value::is_null), "{after}");
                }
                let mut expected = before.clone();
                if engine == Engine::Vllm {
                    if let Some(xargs) = after.get("vllm_xargs").and_then(Value::as_object) {
                        assert!(
                            VLLM.iter().all(|name| !xargs.contains_key(*name)),
                            "{after}"
                        );
                    }
                    if let Some(xargs) = expected
                        .get_mut("vllm_xargs")
                        .and_then(Value::as_object_mut)
                    {
                        xargs.retain(|name, _| !VLLM.contains(&name.as_str()));
                    }
                }
                // And nothing else is lost.
                for all in [&mut after, &mut expected] {
                    let all = all.as_object_mut().expect("an object");
                    all.retain(|name, _| {
                        !SGLANG.contains(&name.as_str()) && !VLLM.contains(&name.as_str())
                    });
                }
                assert_eq!(after, expected);
            }
        }
    });
}

#[test]
fn bodies_are_scanned_and_spliced_as_serde_reads_them() {
    let long: Vec<u32> = (0..60).map(|i| i * 7_919 % 151_000).collect();
    let mut seeds: Vec<Vec<u8>> = [
        r#"{"input_ids":[1,22,333],"stream":true,"sampling_params":{"max_new_tokens":7,"stop":["}"]}}"#,
        r#"{"text":"a\"b\\\\","rid":"r","bootstrap_room":1, "x":[{},[],null,-1.5e-3]}"#,
        r#"{"prompt":[[1,2],[3]],"max_tokens":9,"user":"u"}"#,
        r#"{"messages":[{"role":"user","content":"[{\"a\"}]"}],"stream": false , "max_completion_tokens":3}"#,
        "{ }",
    ]
    .iter()
    .map(|seed| seed.as_bytes().to_vec())
    .collect();
    seeds.push(format!("{{\"input_ids\":{long:?}}}").into_bytes());
    seeds.push(
        serde_json::json!({"prompt": long, "stream": true})
            .to_string()
            .into_bytes(),
    );
    fuzz(move |data| {
        let body = Bytes::from(mutated(data, &seeds));
        let read = serde_json::from_slice::<Members>(&body);
        for api in Api::ALL {
            let scanned = scan(api, &body, 2, 16);
            // The same whatever had come when it was first looked at.
            let mut scanner = Scanner::new(api, 2, 16);
            for &cut in data.iter().take(3) {
                let cut = usize::from(cut) * body.len() / 256;
                scanner.scan_ahead(&body[..cut], body.len());
            }
            assert_eq!(scanner.scan(&body), scanned);
            let Ok(Members(members)) = &read else {
                continue;
            };
            let key = match api {
                Api::Generate => "input_ids",
                Api::Completions => "prompt",
                Api::Chat | Api::Messages => "messages",
                Api::Responses => "input",
            };
            let of = |name: &str| -> Vec<&Value> {
                let same = members.iter().filter(|(key, _)| key == name);
                same.map(|(_, value)| value).collect()
            };
            let ids = match of(key)[..] {
                [value] if of("text").is_empty() => token_ids(value),
                _ => None,
            };
            if let (Some(ids), Api::Generate | Api::Completions) = (ids, api) {
                let scanned = scanned.as_ref().expect("serde reads it");
                assert_eq!(scanned.prompt, hashes(&ids));
                if let [Value::Bool(stream)] = of("stream")[..] {
                    assert_eq!(scanned.stream, *stream);
                }
            }
            if let Ok(scanned) = scanned {
                let spliced = splice(&body, &scanned, bootstrap_fields("h", None, 5)).concat();
                let Members(after) = serde_json::from_slice(&spliced).expect("still JSON");
                assert_eq!(after[..members.len()], members[..]);
                let added: Vec<_> = after[members.len()..]
                    .iter()
                    .map(|m| m.0.as_str())
                    .collect();
                assert_eq!(
                    added,
                    ["bootstrap_host", "bootstrap_port", "bootstrap_room"]
                );
            }
        }
    });
}

/// Events with data, less `[DONE]`, and whether the last was that; line by line.
fn events_of(stream: &[u8]) -> (u64, bool) {
    let (mut events, mut done) = (0, false);
    let mut data: Option<Vec<u8>> = None;
    // A line ends with LF, CR LF or CR.
    let text: Vec<u8> = stream.to_vec();
    let mut lines: Vec<Vec<u8>> = vec![Vec::new()];
    for (at, &byte) in text.iter().enumerate() {
        match byte {
            b'\n' if at > 0 && text[at - 1] == b'\r' => {}
            b'\n' | b'\r' => lines.push(Vec::new()),
            _ => lines.last_mut().expect("one").push(byte),
        }
    }
    let unfinished = lines.pop().unwrap_or_default();
    for line in lines {
        if line.is_empty() {
            if let Some(data) = data.take() {
                done = data == b"[DONE]";
                events += u64::from(!done);
            }
        } else if let Some(rest) = line.strip_prefix(b"data:") {
            data = Some(rest.trim_ascii().to_vec());
        }
    }
    if let Some(data) = data {
        done = data == b"[DONE]";
    }
    (events, done && !unfinished.starts_with(b"data:"))
}

#[test]
fn event_streams_are_counted_alike_however_they_are_cut() {
    let seeds: Vec<Vec<u8>> = [
        "data: {\"text\":\"a\"}\n\ndata: {\"text\":\"b\"}\n\ndata: [DONE]\n\n",
        "data: a\r\n\r\ndata: [DONE]\r\n\r\n",
        "data: a\r\rdata: [DONE]\r\r",
        ": ping\n\nevent: x\ndata: 1\ndata: 2\n\n\n\ndata:[DONE]\n\n",
    ]
    .iter()
    .map(|seed| seed.as_bytes().to_vec())
    .collect();
    fuzz(move |data| {
        let stream = mutated(data, &seeds);
        let (expected, done) = events_of(&stream);
        for cut in 0..=stream.len() {
            let mut progress = SseProgress::default();
            let (head, tail) = stream.split_at(cut);
            let counted = progress.feed(head) + progress.feed(tail);
            assert_eq!((counted, progress.is_done()), (expected, done));
        }
        let mut progress = SseProgress::default();
        let counted: u64 = stream.chunks(1).map(|byte| progress.feed(byte)).sum();
        assert_eq!((counted, progress.is_done()), (expected, done));
    });
}

fn packed(value: &rmpv::Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).expect("a vector takes everything");
    bytes
}

#[test]
fn kv_events_never_leave_the_index_inconsistent() {
    let list =
        |numbers: &[i64]| rmpv::Value::Array(numbers.iter().map(|&number| number.into()).collect());
    let stored = |blocks: &[i64], parent: Option<i64>, tokens: &[i64]| {
        rmpv::Value::Array(vec![
            "BlockStored".into(),
            list(blocks),
            parent.map_or(rmpv::Value::Nil, Into::into),
            list(tokens),
            2.into(),
        ])
    };
    let batch = |events: Vec<rmpv::Value>| {
        packed(&rmpv::Value::Array(vec![
            1.5.into(),
            rmpv::Value::Array(events),
        ]))
    };
    let removed = rmpv::Value::Array(vec!["BlockRemoved".into(), list(&[2])]);
    let cleared = rmpv::Value::Array(vec!["AllBlocksCleared".into()]);
    let seeds = vec![
        batch(vec![stored(&[1, 2], None, &[1, 2, 3, 4])]),
        batch(vec![
            stored(&[1], None, &[1, 2]),
            stored(&[3], Some(1), &[5, 6]),
            removed,
        ]),
        batch(vec![stored(&[1, 1], None, &[1, 2, 1, 2]), cleared]),
    ];
    let prompt = hashes(&[1, 2, 3, 4, 5, 6]);
    fuzz(move |data| {
        let mut index = ExactIndex::default();
        for (worker, half) in data.chunks(data.len().div_ceil(2).max(1)).enumerate() {
            for event in decode(&mutated(half, &seeds)).unwrap_or_default() {
                index.apply(worker, &event);
            }
        }
        index.matched(&prompt, 1, &[(0, 0), (1, 7)], |worker, _| {
            assert!(index.held_blocks(worker as usize) > 0);
        });
        index.clear(0);
        index.clear(1);
        index.matched(&prompt, 1, &[(0, 0), (1, 7)], |worker, _| {
            panic!("worker {worker} holds nothing")
        });
    });
}
