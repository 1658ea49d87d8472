//! The settings `[admission]` of the router's configuration: the rule, its parameters, and what holds
//! for every rule.

use super::rules::{self, Rule};
use crate::policy::ParamInfo;
use serde::Deserialize;
use serde_json::Value;

/// What holds for every rule.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    fill: Option<f64>,
    pub max_waiting: usize,
    pub max_wait_s: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            fill: None,
            max_waiting: 10_000,
            max_wait_s: 600.0,
        }
    }
}

/// Settings of every rule.
pub const PARAMS: &[ParamInfo] = &[
    ParamInfo {
        name: "fill",
        default: "0.95",
        meaning: "the share of a worker's KV that may be booked (lease has its own). Where it is not set 0.98 on workers with a host tier",
    },
    ParamInfo {
        name: "max_waiting",
        default: "10000",
        meaning: "turns that may wait; more are refused with 429",
    },
    ParamInfo {
        name: "max_wait_s",
        default: "600",
        meaning: "a turn that has waited so long is refused with 503",
    },
];

impl Settings {
    /// The share of a worker's KV that may be booked. Where sessions outgrow it, a host tier gives back what was
    /// evicted and costs a reload; without one it is prefilled again. So less is kept free beside a host tier.
    pub fn fill(&self, has_host_tier: bool) -> f64 {
        self.fill.unwrap_or(if has_host_tier { 0.98 } else { 0.95 })
    }

    fn check(&self) -> Result<(), String> {
        let is_time = |seconds: f64| seconds > 0.0 && seconds <= 7.0 * 86_400.0;
        for (name, expected, holds) in [
            (
                "fill",
                "a share above 0 and up to 1",
                self.fill.is_none_or(|fill| fill > 0.0 && fill <= 1.0),
            ),
            (
                "max_waiting",
                "a whole number above 0",
                self.max_waiting > 0,
            ),
            (
                "max_wait_s",
                "a number of seconds above 0 and up to 7 days",
                is_time(self.max_wait_s),
            ),
        ] {
            if !holds {
                return Err(format!("{name}: expected {expected}"));
            }
        }
        Ok(())
    }
}

/// A rule with its settings.
pub struct Chosen {
    pub name: &'static str,
    pub settings: Settings,
    pub rule: Box<dyn Rule>,
}

/// The rule that holds where none is named.
pub const DEFAULT_RULE: &str = "rotate";

/// Builds the rule that `value`, the table `[admission]`, names; null is the default.
///
/// # Errors
/// One line that names the field and what was expected.
pub fn build(value: &Value) -> Result<Chosen, String> {
    let failed = |error: String| format!("admission: {error}");
    let empty = serde_json::Map::new();
    let table = match value {
        Value::Null => &empty,
        Value::Object(table) => table,
        _ => return Err(failed("expected a table".to_owned())),
    };
    let name = match table.get("rule") {
        None => DEFAULT_RULE,
        Some(Value::String(name)) => name,
        Some(other) => return Err(failed(format!("rule: expected text, not {other}"))),
    };
    let info = rules::TABLE.iter().find(|info| info.name == name);
    let info = info.ok_or_else(|| {
        let known: Vec<_> = rules::TABLE.iter().map(|info| info.name).collect();
        failed(format!(
            "rule: {name} is unknown; known: {}",
            known.join(", ")
        ))
    })?;
    let (mut common, mut own) = (serde_json::Map::new(), serde_json::Map::new());
    for (key, value) in table.iter().filter(|(key, _)| *key != "rule") {
        let is_own = info.params.iter().any(|param| param.name == key);
        let is_common = PARAMS.iter().any(|param| param.name == key);
        if !is_common && !is_own {
            let params = info.params.iter().chain(PARAMS.iter());
            let mut known: Vec<_> = params.map(|param| param.name).collect();
            // A parameter of both is named once, as the rule's.
            let mut seen = std::collections::HashSet::new();
            known.retain(|name| seen.insert(*name));
            return Err(failed(format!(
                "{key}: unknown with rule {name}; known: {}",
                known.join(", ")
            )));
        }
        if value.is_null() {
            // What became of TOML's nan and inf, for which JSON has no word.
            return Err(failed(format!(
                "{key}: expected a value that is not nan, inf or null"
            )));
        }
        // A parameter of both is said once.
        if is_common {
            common.insert(key.clone(), value.clone());
        }
        if is_own {
            own.insert(key.clone(), value.clone());
        }
    }
    let settings: Settings = crate::model::checks::read(common.into()).map_err(failed)?;
    settings.check().map_err(failed)?;
    let rule = (info.build)(own.into()).map_err(failed)?;
    Ok(Chosen {
        name: info.name,
        settings,
        rule,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rule_and_its_parameters_stand_side_by_side() {
        let chosen = build(&json!({"rule": "cap", "sessions": 5, "max_wait_s": 30.0}));
        let chosen = chosen.map_err(|error| panic!("{error}")).expect("a rule");
        assert_eq!(chosen.settings.max_wait_s, 30.0);
        assert_eq!(chosen.name, "cap");
        let default = build(&Value::Null).map_err(|error| panic!("{error}"));
        assert_eq!(default.expect("a rule").name, DEFAULT_RULE);
    }

    #[test]
    fn the_documented_defaults_are_those_that_hold() {
        for info in rules::TABLE {
            let mut table = serde_json::Map::from_iter([("rule".to_owned(), info.name.into())]);
            for param in info.params.iter().chain(PARAMS.iter()) {
                let value = serde_json::from_str(param.default).expect("JSON");
                table.insert(param.name.to_owned(), value);
            }
            assert!(build(&table.into()).is_ok(), "{}", info.name);
        }
    }

    #[test]
    fn less_is_kept_free_beside_a_host_tier_unless_it_is_set() {
        let fill = |table| match build(&table) {
            Ok(chosen) => [false, true].map(|tier| chosen.settings.fill(tier)),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(fill(json!({})), [0.95, 0.98]);
        assert_eq!(fill(json!({"rule": "lease", "fill": 0.9})), [0.9, 0.9]);
    }

    #[test]
    fn what_a_rule_knows_is_named_once() {
        for info in rules::TABLE {
            let error = build(&json!({"rule": info.name, "lru": 1})).err();
            let error = error.expect("refused");
            let (_, known) = error.split_once("known: ").expect("what is known");
            let names: Vec<_> = known.split(", ").collect();
            let once: std::collections::HashSet<_> = names.iter().collect();
            assert_eq!(names.len(), once.len(), "{error}");
            assert!(names.contains(&"max_wait_s"), "{error}");
        }
    }

    #[test]
    fn wrong_settings_are_named() {
        for (table, field) in [
            (json!({"rule": "lru"}), "rule"),
            (json!({"rule": "cap", "lease_s": 1}), "lease_s"),
            (
                json!({"rule": "rotate", "wait_bound_s": 60}),
                "wait_bound_s",
            ),
            (json!({"fill": 1.5}), "fill"),
            (json!({"fill": 0}), "fill"),
            (json!({"max_waiting": -1}), "max_waiting"),
            (json!({"max_wait_s": 0}), "max_wait_s"),
            (json!({"rule": 3}), "rule"),
            (json!([]), "admission"),
        ] {
            let error = build(&table).err().expect("refused");
            assert!(
                error.starts_with("admission: ") && error.contains(field),
                "{error}"
            );
        }
    }
}
