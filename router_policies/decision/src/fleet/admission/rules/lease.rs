//! `lease`: prompts against the KV; an idle session stays for a fixed time.

use super::{Info, Manner, Placement, Prompt, Rule, WorkerView, parse};
use crate::policy::ParamInfo;
use serde::Deserialize;

pub const INFO: Info = Info {
    name: "lease",
    summary: "prompts against the KV; an idle session stays for a fixed time",
    rule: "a session comes in where all of it fits beside those who are, at the worker where it was before \
           while that is up; who has been idle for lease_s leaves for one that waits, longest idle first",
    params: &[ParamInfo {
        name: "lease_s",
        default: "30",
        meaning: "an idle session stays for so long, though others wait",
    }],
    source: "llm-d-router, draft 3076 (lease gate), as its measurements describe it; shared prefixes are \
             counted once here",
    build: |params| {
        let lease = parse::<Lease>(params, |lease| {
            vec![("lease_s", "a number above 0", lease.lease_s > 0.0)]
        })?;
        Ok(Box::new(lease))
    },
};

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Lease {
    lease_s: f64,
}

impl Default for Lease {
    fn default() -> Self {
        Self { lease_s: 30.0 }
    }
}

impl Rule for Lease {
    fn manner(&self) -> Manner {
        Manner {
            by_tokens: true,
            placement: Placement::HomeOnly,
            fill: Some(1.0),
            idle_s: self.lease_s,
            ..Manner::default()
        }
    }

    fn lets_in(&self, view: &WorkerView<'_>, prompt: Prompt) -> bool {
        view.tokens + prompt.new_tokens <= view.kv_capacity_tokens || view.seated.is_empty()
    }
}
