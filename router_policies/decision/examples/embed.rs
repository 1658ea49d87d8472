use decision::fleet::admission::settings;
use decision::fleet::log::EventSink;
use decision::fleet::prefix::hash::PromptHashes;
use decision::fleet::{Admit, Fleet, Outcome, Request, Usage};
use serde_json::{from_value, json};
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let policy = decision::policy::build("unified", json!({}))?;
    let fleet = Fleet::new(policy, "unified".to_owned(), EventSink::in_memory(), 1);
    let fleet = Arc::new(fleet.with_admission(settings::build(&json!({"rule": "rotate"}))?));
    for id in ["a", "b"] {
        let url = format!("http://{id}:1");
        let worker = json!({"id": id, "url": url, "kv_capacity_tokens": 100_000});
        fleet.add_worker(from_value(worker)?)?;
        fleet.report_health(id, true);
    }
    let prompt: Vec<u32> = (0..30_000).collect();
    let request = Request {
        session_id: Some("conversation 1".to_owned()),
        prompt: PromptHashes::of_tokens(&prompt, fleet.token_block()),
        ..Request::default()
    };
    match fleet.admit(
        &request,
        &[],
        || { /* wake who waits: then ask `place_ticket` */ },
    ) {
        Admit::Placed(mut turn) => {
            println!("send it to {}", turn.answering().url);
            turn.output(1); // the first token came
            let prompt_tokens = Some(30_000);
            turn.report(Usage {
                prompt_tokens,
                ..Usage::default()
            });
            turn.finish(Outcome::Ok, Some(200), None);
        }
        Admit::Waiting(_ticket) => println!("no KV for it now"),
        Admit::Refused(why) => println!("nobody can: {why:?}"),
    }
    assert!(fleet.is_idle());
    Ok(())
}
